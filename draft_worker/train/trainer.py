"""The training loop: one step after the other until the steps or the slice's time run out."""

import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

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
from target_worker.train.optimizer import Optimizer
from target_worker.train.schedule import Pace, learning_rate
from target_worker.train.state import Progress, facts_of, has_state, load_state, read_facts, save_state

logger = logging.getLogger(__name__)

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


class Trainer:
    """A drafter in training. `run` does a slice."""

    def __init__(
        self, paths: Paths, drafter: DrafterConfig, loss: LossConfig, config: TrainConfig, device: str
    ) -> None:
        """Raises ValueError if target, answers, drafter and saved state do not fit each other."""
        self._paths, self._loss, self._config = paths, loss, config
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
        self._params = {name: tensor.to(self._device).requires_grad_() for name, tensor in started.items()}
        self._optimizer = Optimizer(self._params, config)
        self.progress = self._resume(drafter)
        self._epochs: list[list[np.ndarray]] = []

    def _resume(self, drafter: DrafterConfig) -> Progress:
        state = self._paths.state
        self._identity = {"drafter": asdict(drafter) | {"taps": list(drafter.taps)}, "seed": self._config.seed}
        self._identity["sequences"] = len(self._sequences)
        if not has_state(state):
            return Progress(total_steps=self._config.steps)
        found = read_facts(state)["identity"]
        if found != self._identity:
            raise ValueError(f"{state} holds a run of {found}, asked for is {self._identity}")
        progress = load_state(state, self._params, self._optimizer)
        progress.total_steps = self._config.steps or progress.total_steps
        return progress

    @property
    def is_done(self) -> bool:
        """All steps are made."""
        return bool(self.progress.total_steps) and self.progress.step >= self.progress.total_steps

    def model(self, dtype: torch.dtype | None = None) -> DraftModel:
        """The drafter as it stands, in the target's dtype."""
        dtype = dtype or self._target.model.dtype
        cast = {name: tensor.to(dtype) for name, tensor in self._params.items()}
        return assemble(self._shape, cast, self._borrowed, self._vocab)

    def run(self) -> None:
        """Train until all steps are made or max_seconds are over; then estimate, save and write the drafter."""
        config, progress = self._config, self.progress
        started, before = time.monotonic(), progress.seconds
        pace = Pace(self._device)
        self._fix_steps(pace)
        with tqdm(total=progress.total_steps or None, initial=progress.step, desc="train", unit="step") as bar:
            while not self.is_done and not self._late(started):
                facts = self._step()
                pace.mark()
                progress.seconds = before + time.monotonic() - started
                self._fix_steps(pace)
                bar.total = progress.total_steps or None
                bar.update()
                if progress.step % config.log_every == 0:
                    bar.set_postfix(loss=self._log_step(facts, pace)["loss"], refresh=False)
                if progress.step % config.eval_every == 0 and not self.is_done:
                    self._estimate()
        self._estimate()
        self.save()

    def _late(self, started: float) -> bool:
        return bool(self._config.max_seconds) and time.monotonic() - started > self._config.max_seconds

    def _fix_steps(self, pace: Pace) -> None:
        """Decide how many steps there are, as soon as it can be known."""
        config, progress = self._config, self.progress
        if progress.total_steps:
            return
        if not config.fit_seconds:
            progress.total_steps = max(1, round(config.epochs * len(self._batches(0))))
        elif fitting := pace.fitting(config.fit_seconds):
            progress.total_steps = max(config.warmup_steps + 1, fitting)
        else:
            return
        logger.info("steps=%d per_epoch=%d", progress.total_steps, len(self._batches(0)))

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
        rng = np.random.default_rng((self._config.seed, 3, self.progress.step))
        return make_batch(self._sequences, self._batches(epoch)[left], self._config.anchor_stride, rng)

    def _step(self) -> dict[str, torch.Tensor]:
        """One update; the loss and its parts, still on the device."""
        batch = self._next_batch()
        model = self.model()
        blocks = make_blocks(batch, self._shape.block_size, self._device)
        features, hidden = self._target.read(blocks.tokens)
        rows = Rows(
            z=block_rows(model, blocks, features).flatten(0, 1),
            before=blocks.before.flatten(),
            labels=blocks.labels.flatten(),
            target=self._target.probabilities(
                hidden_before(hidden, blocks), model.draft_to_target, self._loss.tv_temperature
            ),
            num_drafts=self._shape.block_size - 1,
        )
        loss, parts = block_loss(model, rows, self._loss)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._params.values(), self._config.clip)
        self._optimizer.step(learning_rate(self._config, self.progress))
        self.progress.step += 1
        self.progress.tokens += batch.tokens.size
        return parts | {"loss": loss.detach(), "gradient": norm.detach()}

    def _log_step(self, facts: dict[str, torch.Tensor], pace: Pace) -> dict[str, Any]:
        line = {name: _rounded(value) for name, value in facts.items()}
        line |= {
            "lr": learning_rate(self._config, self.progress),
            "steps_per_s": round(pace.steps_per_s(self._config.log_every), 3),
        }
        return self._write("step", line)

    def _estimate(self) -> None:
        facts = estimate(self.model(), self._target, self._sequences, self._held_out)
        self._write("held_out", facts)
        shown = " ".join(f"{name}={value}" for name, value in facts.items() if not isinstance(value, list))
        logger.info("step=%d %s", self.progress.step, shown)

    def _write(self, kind: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Add a line to the log."""
        progress = self.progress
        head = {"kind": kind, "step": progress.step, "seconds": round(progress.seconds, 1), "tokens": progress.tokens}
        self._paths.state.mkdir(parents=True, exist_ok=True)
        with (self._paths.state / LOG_FILE).open("a", encoding="utf-8") as log:
            log.write(json.dumps(head | facts) + "\n")
        return facts

    def save(self) -> None:
        """Write state and drafter."""
        facts = facts_of(self.progress, identity=self._identity, train=asdict(self._config), loss=asdict(self._loss))
        save_state(self._paths.state, self._params, self._optimizer, facts)
        checkpoint.write_drafter(self._paths.out, self._json, self._params, self._vocab, torch.bfloat16)


def _draft_vocab(sequences: Sequences, kept: np.ndarray, size: int, vocab_size: int) -> torch.Tensor | None:
    """Token ids, ascending, that stand most often in the answers trained on; of equals the lower. None for all."""
    if not size or size >= vocab_size:
        return None
    part = sequences.select(kept)
    place = np.arange(len(part.tokens)) - np.repeat(part.ends - part.lens, part.lens)
    answers = part.tokens[place >= np.repeat(part.prompt_lens, part.lens)]
    counts = np.bincount(answers, minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def _rounded(value: torch.Tensor) -> float | list[float]:
    return [round(float(part), 4) for part in value] if value.dim() else round(float(value), 4)
