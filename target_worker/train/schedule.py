"""How fast a run learns, and how many steps fit into its time."""

import math
import time

import torch

from target_worker.train.run_config import RunConfig
from target_worker.train.state import Progress

_LEAST_LR = 0.01
_MEASURED = slice(20, 60)
"""Steps whose time tells how many fit."""
_FIT_SHARE = 0.94
"""Of the time that steps may take: the rest goes to estimates and files."""


def learning_rate(config: RunConfig, progress: Progress) -> float:
    """Of the step that comes next: linear to the peak, then a cosine to a hundredth of it.

    While the number of steps is not known yet the peak holds.
    """
    step = progress.step
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if not progress.total_steps:
        return config.lr
    share = (step - config.warmup_steps) / max(1, progress.total_steps - config.warmup_steps)
    return config.lr * (_LEAST_LR + (1 - _LEAST_LR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


class Pace:
    """When the steps of a slice ended, and what follows from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[float] = []

    def mark(self) -> None:
        """A step was made."""
        if len(self._marks) in (_MEASURED.start, _MEASURED.stop - 1) and self._device.type == "cuda":
            torch.cuda.synchronize()
        self._marks.append(time.monotonic())

    def fitting(self, seconds: float) -> int:
        """Steps that fit into so many seconds; 0 as long as it cannot be known."""
        if len(self._marks) <= _MEASURED.stop:
            return 0
        first, last = _MEASURED.start, _MEASURED.stop - 1
        return int(_FIT_SHARE * seconds / ((self._marks[last] - self._marks[first]) / (last - first)))

    def steps_per_s(self, num: int) -> float:
        """Over the last so many steps, or those there are; 0 before the second."""
        window = self._marks[-1 - num :]
        return (len(window) - 1) / max(1e-9, window[-1] - window[0]) if len(window) > 1 else 0.0
