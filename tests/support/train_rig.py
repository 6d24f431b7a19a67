"""A tiny target with answers of its own, and small configs, for tests of draft_worker.train."""

from pathlib import Path
from typing import Any

import numpy as np

from draft_worker.train.config import DrafterConfig, GenerateConfig, LossConfig, TrainConfig
from draft_worker.train.generate import Generation
from draft_worker.train.sequences import Sequences, from_lists, write_sequences
from draft_worker.train.trainer import Paths, Trainer
from target_worker.model.weights import load_target
from tests.support.tiny_hybrid import make_hybrid
from tests.support.tiny_target import make_target, tokens_of

VOCAB = 97
NO_FILTER = {"loop_share": 1.0}


def small_drafter(version: int = 2, **changes: int) -> DrafterConfig:
    """Two layers, B = 4, a window that bites, and a head of half the vocabulary."""
    sizes = {"layers": 2, "num_taps": 2, "block_rows": 4, "window": 8, "draft_vocab": 48, "rank": 4, "top_k": 6}
    return DrafterConfig(version=version, mask_token_id=5, conv_group=8, **sizes | changes)


def small_prompts(num: int = 12) -> Sequences:
    """Prompts of one token and more."""
    return from_lists([tokens_of(index, 1 + index % 7) for index in range(num)], VOCAB, [0] * num)


def small_answers(target: Path, num: int = 12, max_new: int = 24) -> Sequences:
    """Greedy and sampled answers of the target."""
    model, _ = load_target(target)
    config = GenerateConfig(slots=5, max_new=max_new, refill_every=3, **NO_FILTER)
    return Generation(model, small_prompts(num), config).run().sequences()


def make_run(folder: Path) -> Paths:
    """A target and its answers in folder."""
    (folder / "target").mkdir()
    make_target(folder / "target", "Llama")
    return answer_prompts(folder)


def make_hybrid_run(folder: Path, **overrides: Any) -> Paths:
    """The same of a target with recurrent layers."""
    (folder / "target").mkdir()
    make_hybrid(folder / "target", **overrides)
    return answer_prompts(folder)


def answer_prompts(folder: Path) -> Paths:
    """Let the target in folder answer."""
    write_sequences(folder / "answers", "answers", small_answers(folder / "target"), 1 << 20)
    return paths_of(folder, "run")


def paths_of(folder: Path, name: str) -> Paths:
    """Another run on the same target and answers."""
    run = folder / name
    return Paths(
        target=folder / "target", answers=folder / "answers", state=run / "state", out=run / "drafter", init=None
    )


def make_trainer(paths: Paths, drafter: DrafterConfig | None = None, **changes: float) -> Trainer:
    """A trainer on the CPU."""
    sizes = {"steps": 8, "tokens_per_step": 256, "anchor_stride": 3, "warmup_steps": 2, "held_out": 2, "log_every": 2}
    return Trainer(paths, drafter or small_drafter(), LossConfig(), TrainConfig(**sizes | changes), "cpu")


def all_places(sequences: Sequences) -> np.ndarray:
    """Indices of all sequences."""
    return np.arange(len(sequences))
