"""A server that exists only as a cost for each step and a rate of acceptance, to try a chooser of widths on."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from target_worker.width import Change, Width

WIDTHS = (0, 1, 2, 3, 5, 7)

Costs = Callable[[int, int], float]
"""Seconds of a step of num_reqs blocks of num_drafts drafts."""


def costs(row: float, draft: float = 0.35, base: float = 1.0, free_rows: int = 0) -> Costs:
    """Seconds: base a forward, row for each row past the free ones, and for the draft as much again, times draft."""

    def seconds(num_reqs: int, num_drafts: int) -> float:
        rows = num_reqs * (1 + num_drafts)
        verify = base + row * max(0, rows - free_rows)
        return verify + (draft * verify if num_drafts else 0.0)

    return seconds


def tokens(rate: float, num_drafts: int) -> float:
    """Tokens of a block in the mean if each draft is accepted with this chance after those before it."""
    return sum(rate**place for place in range(num_drafts + 1))


def best_rate(seconds: Costs, rate: float, num_reqs: int) -> tuple[float, int]:
    """Tokens a second of one request with the best fixed width, and that width."""
    return max((tokens(rate, width) / seconds(num_reqs, width), width) for width in WIDTHS)


@dataclass(slots=True)
class WidthRig:
    """Runs steps; counts time, tokens of one request (in the mean), and the widths."""

    width: Width
    seconds: Costs
    rate: float
    noise: float = 0.0
    """Steps take up to this share longer or shorter."""
    prompt_row: float = 0.0
    """Seconds of a prompt token."""
    seed: int = 0
    time: float = 0.0
    num_tokens: float = 0.0
    chosen: list[int] = field(default_factory=list)
    slow: float = 1.0
    """Of a machine that others use as well: factor on everything."""
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, num_steps: int, num_reqs: int | Sequence[int], prompts: Sequence[int] = (0,)) -> None:
        """num_reqs and prompts (prompt tokens of a step) are repeated as long as needed."""
        sizes = [num_reqs] if isinstance(num_reqs, int) else num_reqs
        for step in range(num_steps):
            self._step(sizes[step % len(sizes)], prompts[step % len(prompts)])

    def _step(self, num_reqs: int, prompt_rows: int) -> None:
        num_drafts = self.width.choose(num_reqs)
        decode = self.seconds(num_reqs, num_drafts) * self.slow
        noisy = (decode + self.prompt_row * prompt_rows * self.slow) * (1 + self.noise * self._rng.uniform(-1, 1))
        accepted = [self._accepted(num_drafts) for _ in range(num_reqs)]
        for num in accepted if num_drafts else []:
            self.width.observe_block(num_drafts, num)
        self.width.observe_step(num_reqs, num_drafts, num_reqs + sum(accepted), prompt_rows, noisy)
        self.time += decode
        self.num_tokens += tokens(self.rate, num_drafts)
        self.chosen.append(num_drafts)

    def _accepted(self, num_drafts: int) -> int:
        num = 0
        while num < num_drafts and self._rng.random() < self.rate:
            num += 1
        return num

    def restart(self) -> None:
        """Count from here on."""
        self.time = self.num_tokens = 0.0
        self.chosen.clear()

    @property
    def throughput(self) -> float:
        """Tokens a second of one request, chunks of prompts not counted."""
        return self.num_tokens / self.time


class Forced:
    """A Width that follows a schedule: of the number of steps asked for so far."""

    def __init__(self, schedule: Callable[[int], int]) -> None:
        self._schedule = schedule
        self._num = -1

    def choose(self, num_reqs: int) -> int:
        """See Width."""
        self._num += 1
        return self._schedule(self._num)

    def observe_step(self, num_reqs: int, num_drafts: int, num_tokens: int, prompt_rows: int, seconds: float) -> None:
        """See Width."""

    def observe_block(self, num_drafts: int, num_accepted: int) -> None:
        """See Width."""

    def take_changes(self) -> list[Change]:
        """See Width."""
        return []
