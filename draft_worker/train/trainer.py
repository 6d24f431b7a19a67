"""A drafter in training: its batches, its loss, its estimates."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draft_worker.borrowed import borrow
from draft_worker.model import DraftModel
from draft_worker.shape import DraftShape
from draft_worker.train import checkpoint
from draft_worker.train.batches import Batch, Schedule, make_batch, split_held_out
from draft_worker.train.blocks import block_rows, make_blocks
from draft_worker.train.config import DrafterConfig, LossConfig, TrainConfig
from draft_worker.train.drafter import assemble, drafter_json, first_weights
from draft_worker.train.fused_target import fuse
from draft_worker.train.held_out import estimate, hidden_before
from draft_worker.train.losses import Rows, block_loss
from draft_worker.train.sequences import Sequences, read_sequences
from draft_worker.train.target import FrozenTarget
from target_worker.model.weights import load_target
from target_worker.train.sliced_run import SlicedRun

LOG_FILE = "train.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """Where a run reads and writes."""

    target: Path
    answers: Path
    state: Path
    """Folder of the state and the log; a run goes on from what is there."""
    out: Path
    """Folder of the drafter."""
    init: Path | None
    """Drafter to start from; None starts afresh."""


class Trainer(SlicedRun):
    """A drafter in training. `run` does a slice."""

    log_file = LOG_FILE

    def __init__(
        self, paths: Paths, drafter: DrafterConfig, loss: LossConfig, config: TrainConfig, device: str
    ) -> None:
        """Raises ValueError if target, answers, drafter and saved state do not fit each other."""
        self._paths, self._losses, self._train = paths, loss, config
        self._device = torch.device(device)
        model, shape = load_target(paths.target, device=device)
        self._sequences = read_sequences(paths.answers)
        kept, self._held_out = split_held_out(self._sequences, config.held_out, config.seed)
        self._schedule = Schedule(self._sequences, kept, config.tokens_per_step, config.seed)
        vocab = _draft_vocab(self._sequences, kept, drafter.draft_vocab, shape.vocab_size)
        # On the device once: a copy in every step would wait for the step before.
        self._vocab = None if vocab is None else vocab.to(self._device)
        num_rows = shape.vocab_size if self._vocab is None else len(self._vocab)
        self._json = drafter_json(drafter, shape, num_rows, "bfloat16")
        self._shape = DraftShape.from_json(self._json)
        self._borrowed = borrow(paths.target, self._shape, "auto", model.dtype, device)
        self._target = FrozenTarget(fuse(model), self._shape.target_layer_ids)
        # The head is the target's, so what it reads begins at the target's scale.
        started = first_weights(self._shape, config.seed) | {"norm.weight": model.norm.weight.detach().float().clone()}
        if paths.init is not None:
            started |= checkpoint.read_drafter(paths.init, self._shape)
        self._epochs: list[list[np.ndarray]] = []
        params = {name: tensor.to(self._device).requires_grad_() for name, tensor in started.items()}
        identity = {"drafter": asdict(drafter) | {"taps": list(drafter.taps)}, "sequences": len(self._sequences)}
        super().__init__(config, paths.state, params, identity, {"loss": asdict(loss)})

    def model(self, dtype: torch.dtype | None = None) -> DraftModel:
        """The drafter as it stands, in the target's dtype."""
        dtype = dtype or self._target.model.dtype
        cast = {name: tensor.to(dtype) for name, tensor in self.params.items()}
        return assemble(self._shape, cast, self._borrowed, self._vocab)

    def _planned_steps(self) -> int:
        return 0 if self._train.fit_seconds else max(1, round(self._train.epochs * len(self._batches(0))))

    def _batches(self, epoch: int) -> list[np.ndarray]:
        """All passes are kept: a step counts through those before its own, and making one takes as long as some steps."""
        while len(self._epochs) <= epoch:
            self._epochs.append(self._schedule.epoch(len(self._epochs)))
        return self._epochs[epoch]

    def _next_batch(self) -> Batch:
        """That of the current step: a function of seed and step alone."""
        epoch, left = 0, self.progress.step
        while left >= (size := len(self._batches(epoch))):
            epoch, left = epoch + 1, left - size
        rng = np.random.default_rng((self._train.seed, 3, self.progress.step))
        return make_batch(self._sequences, self._batches(epoch)[left], self._train.anchor_stride, rng)

    def _loss(self) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
        batch = self._next_batch()
        model = self.model()
        blocks = make_blocks(batch, self._shape.block_size, self._device)
        features, hidden = self._target.read(blocks.tokens)
        rows = Rows(
            z=block_rows(model, blocks, features).flatten(0, 1),
            before=blocks.before.flatten(),
            labels=blocks.labels.flatten(),
            target=self._target.probabilities(
                hidden_before(hidden, blocks), model.draft_to_target, self._losses.tv_temperature
            ),
            num_drafts=self._shape.block_size - 1,
        )
        loss, parts = block_loss(model, rows, self._losses)
        return loss, batch.tokens.size, parts

    def _held_out_facts(self) -> dict[str, Any]:
        return estimate(self.model(), self._target, self._sequences, self._held_out)

    def save(self) -> None:
        """Write state and drafter."""
        super().save()
        checkpoint.write_drafter(self._paths.out, self._json, self.params, self._vocab, torch.bfloat16)


def _draft_vocab(sequences: Sequences, kept: np.ndarray, size: int, vocab_size: int) -> torch.Tensor | None:
    """Token ids, ascending, that stand most often in the answers trained on; of equals the lower. None for all."""
    if not size or size >= vocab_size:
        return None
    part = sequences.select(kept)
    place = np.arange(len(part.tokens)) - np.repeat(part.ends - part.lens, part.lens)
    answers = part.tokens[place >= np.repeat(part.prompt_lens, part.lens)]
    counts = np.bincount(answers, minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))
