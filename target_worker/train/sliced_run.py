"""The training loop: one step after the other until the steps or the slice's time run out."""

import json
import logging
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from target_worker.train.optimizer import Optimizer
from target_worker.train.run_config import RunConfig
from target_worker.train.schedule import Pace, learning_rate
from target_worker.train.state import Progress, facts_of, has_state, load_state, read_facts, save_state

logger = logging.getLogger(__name__)


class SlicedRun(ABC):
    """A model in training. `run` does a slice; the next one goes on from the folder of the state."""

    log_file: str
    """Name of the log in that folder."""

    def __init__(
        self,
        config: RunConfig,
        state: Path,
        params: dict[str, torch.Tensor],
        identity: dict[str, Any],
        about: dict[str, Any],
    ) -> None:
        """identity: a state of another one is refused, with a ValueError; about: more that the state says of itself."""
        self._config = config
        self._state = state
        self._identity = identity | {"seed": config.seed}
        self._about = {"train": asdict(config)} | about
        self.params = params
        """float32, by name."""
        self._optimizer = Optimizer(params, config)
        self.progress = self._resume()

    def _resume(self) -> Progress:
        if not has_state(self._state):
            return Progress(total_steps=self._config.steps)
        found = read_facts(self._state)["identity"]
        if found != self._identity:
            raise ValueError(f"{self._state} holds a run of {found}, asked for is {self._identity}")
        progress = load_state(self._state, self.params, self._optimizer)
        progress.total_steps = self._config.steps or progress.total_steps
        return progress

    @abstractmethod
    def _loss(self) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
        """Loss of the next step, the tokens it reads, and what else the log is to have of it."""

    @abstractmethod
    def _held_out_facts(self) -> dict[str, Any]:
        """Measured on what is held out, for the log."""

    def _planned_steps(self) -> int:
        """Steps in all, if they don't depend on time; 0 if they do."""
        return 0

    @property
    def is_done(self) -> bool:
        """All steps are made."""
        return bool(self.progress.total_steps) and self.progress.step >= self.progress.total_steps

    def run(self) -> None:
        """Train until all steps are made or max_seconds are over; then measure and save."""
        config, progress = self._config, self.progress
        started, before = time.monotonic(), progress.seconds
        pace = Pace(next(iter(self.params.values())).device)
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
                    self._measure()
        self._measure()
        self.save()

    def _late(self, started: float) -> bool:
        return bool(self._config.max_seconds) and time.monotonic() - started > self._config.max_seconds

    def _fix_steps(self, pace: Pace) -> None:
        """Decide how many steps there are, as soon as it can be known."""
        config, progress = self._config, self.progress
        if progress.total_steps:
            return
        progress.total_steps = self._planned_steps()
        if not progress.total_steps and (fitting := pace.fitting(config.fit_seconds)):
            progress.total_steps = max(config.warmup_steps + 1, fitting)
        if progress.total_steps:
            logger.info("steps=%d", progress.total_steps)

    def _step(self) -> dict[str, torch.Tensor]:
        """One update; loss, gradient's norm and the rest, still on the device."""
        loss, num_tokens, facts = self._loss()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), self._config.clip)
        self._optimizer.step(learning_rate(self._config, self.progress))
        self.progress.step += 1
        self.progress.tokens += num_tokens
        return facts | {"loss": loss.detach(), "gradient": norm.detach()}

    def _log_step(self, facts: dict[str, torch.Tensor], pace: Pace) -> dict[str, Any]:
        line = {name: _rounded(value) for name, value in facts.items()}
        line |= {
            "lr": learning_rate(self._config, self.progress),
            "steps_per_s": round(pace.steps_per_s(self._config.log_every), 3),
        }
        return self._write("step", line)

    def _measure(self) -> None:
        facts = self._write("held_out", self._held_out_facts())
        shown = " ".join(f"{name}={value}" for name, value in facts.items() if not isinstance(value, list))
        logger.info("step=%d %s", self.progress.step, shown)

    def _write(self, kind: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Add a line to the log."""
        progress = self.progress
        head = {"kind": kind, "step": progress.step, "seconds": round(progress.seconds, 1), "tokens": progress.tokens}
        self._state.mkdir(parents=True, exist_ok=True)
        with (self._state / self.log_file).open("a", encoding="utf-8") as log:
            log.write(json.dumps(head | facts) + "\n")
        return facts

    def save(self) -> None:
        """Write the state."""
        facts = facts_of(self.progress, identity=self._identity, **self._about)
        save_state(self._state, self.params, self._optimizer, facts)


def _rounded(value: torch.Tensor) -> float | list[float]:
    return [round(float(part), 4) for part in value] if value.dim() else round(float(value), 4)
