"""How many tokens to draft in the next step, from what drafts are worth and what steps cost. No torch, no clock.

A step of n requests with k drafts each gives n E(k) tokens in the mean (acceptance.py) and takes C(n, k) seconds
(step_costs.py), the draft's part included. The width is the k with the largest E(k) / C(n, k), tokens a second. k = 0
is a plain step: E = 1, and nothing is drafted. This is the objective of adaptive draft lengths since Leviathan et al.
(arXiv:2211.17192, section 3.5), with both factors measured instead of assumed: the batch is in C.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from target_worker.acceptance import Acceptance
from target_worker.config import TargetConfig
from target_worker.step_costs import PromptCost, StepCosts

PROBE_SHARE = 0.01
"""Throughput that may be lost to steps of a width other than the best known one."""
PROBE_STEPS = 3
"""Steps of a probe; the first counts for little."""
PROBE_EVERY = 48
"""Steps from one probe at a batch size to the next, at least."""
CREDIT_STEPS = 1000
"""Loss that was allowed in so many steps and not used may still be used."""
DEBT_STEPS = 32
"""What is not known at all is tried on credit, up to a loss of so many steps in all."""
WIDER_GAIN = 1.03
"""A wider block has to promise so much more than the one in use,"""
NARROWER_GAIN = 1.01
"""a narrower one so much: it is the safer of two that are equal."""
CERTAIN_STEPS = 6
"""A gain that rests on fewer steps is looked at again first,"""
CLEAR_GAIN = 1.15
"""unless it is as large as this."""
FIRST_WIDTH = 3
"""Where the first batch begins."""


class Width(Protocol):
    """Chooses k for each step and is told what came of it."""

    def choose(self, num_reqs: int) -> int:
        """k of the next step, if so many requests decode in it. Called once a step."""
        ...

    def observe_step(self, num_reqs: int, num_drafts: int, num_tokens: int, prompt_rows: int, seconds: float) -> None:
        """A step of num_reqs > 0 blocks, which gave num_tokens, and of prompt_rows prompt tokens took so long."""
        ...

    def observe_block(self, num_drafts: int, num_accepted: int) -> None:
        """A block was verified, and its request goes on."""
        ...

    def take_changes(self) -> list["Change"]:
        """What was chosen anew since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """Another width for batches of up to num_reqs requests; expected gain in tokens a second over the one before."""

    num_reqs: int
    before: int
    now: int
    gain: float


@dataclass(frozen=True, slots=True)
class FixedWidth:
    """Always the same."""

    num_drafts: int

    def choose(self, num_reqs: int) -> int:
        """See Width."""
        return self.num_drafts

    def observe_step(self, num_reqs: int, num_drafts: int, num_tokens: int, prompt_rows: int, seconds: float) -> None:
        """See Width."""

    def observe_block(self, num_drafts: int, num_accepted: int) -> None:
        """See Width."""

    def take_changes(self) -> list[Change]:
        """See Width."""
        return []


@dataclass(slots=True, eq=False)
class _Batch:
    """Batches of up to num_reqs requests, which are taken to cost the same."""

    num_reqs: int
    costs: StepCosts
    in_use: int
    probed_at: int = 0
    """Its step at which the last probe began."""


@dataclass(slots=True)
class _Probe:
    width: int
    left: int


class AutoWidth:
    """The best width by measurement, looked for in a way that costs PROBE_SHARE of the throughput at most.

    What is not known is tried once: k = 0, then the neighbours of the width in use. After that one of these is
    probed again now and then, whichever was not for longest. What probes lose is booked, and the next one waits
    until the share pays for it. The widths of a batch size are compared by steps taken close to each other, so a
    machine that is slow for a while is slow for all of them.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        """widths: what may be chosen, 0 among them. Raises ValueError if it is not."""
        self._widths = sorted(set(widths))
        if not self._widths or self._widths[0] != 0:
            raise ValueError(f"widths {list(widths)} must hold 0, which is plain decoding")
        self._acceptance = Acceptance(self._widths[-1])
        self._prompt = PromptCost()
        self._batches: dict[int, _Batch] = {}
        self._probe = _Probe(0, 0)
        self._credit = 0.0
        self._last: tuple[_Batch, int] | None = None
        self._last_rows, self._last_seconds = 0, 0.0
        self._changes: list[Change] = []

    def take_changes(self) -> list[Change]:
        """See Width."""
        changes, self._changes = self._changes, []
        return changes

    def choose(self, num_reqs: int) -> int:
        """See Width."""
        if not num_reqs or len(self._widths) == 1:
            return 0
        batch = self._batch(num_reqs)
        if self._probe.left:
            self._probe.left -= 1
            return self._probe.width
        if batch.costs.num_averaged(batch.in_use) < 2:
            return batch.in_use
        self._decide(batch)
        width = self._to_probe(batch)
        if width is None:
            return batch.in_use
        self._probe = _Probe(width, PROBE_STEPS - 1)
        batch.probed_at = batch.costs.num_steps
        return width

    def observe_block(self, num_drafts: int, num_accepted: int) -> None:
        """See Width."""
        self._acceptance.add(num_drafts, num_accepted)

    def observe_step(self, num_reqs: int, num_drafts: int, num_tokens: int, prompt_rows: int, seconds: float) -> None:
        """See Width."""
        batch = self._batch(num_reqs)
        is_first = self._last is None or self._last[1] != num_drafts
        if self._last == (batch, num_drafts):
            self._prompt.add(prompt_rows - self._last_rows, seconds - self._last_seconds)
        self._last, self._last_rows, self._last_seconds = (batch, num_drafts), prompt_rows, seconds
        cost = max(seconds - self._prompt.seconds * prompt_rows, seconds / 8)
        batch.costs.add(num_drafts, cost, in_use=num_drafts == batch.in_use, is_first=is_first)
        self._credit = min(self._credit + PROBE_SHARE * seconds, PROBE_SHARE * CREDIT_STEPS * seconds)
        if num_drafts != batch.in_use and batch.costs.num_averaged(batch.in_use):
            self._credit -= cost - num_tokens / num_reqs / self._rate(batch, batch.in_use)
        if not num_drafts:
            self._acceptance.fade()

    def _batch(self, num_reqs: int) -> _Batch:
        size = next(size for size in _sizes() if size >= num_reqs)
        if size not in self._batches:
            like = self._neighbour(size)
            in_use = like.in_use if like else max(width for width in self._widths if width <= FIRST_WIDTH)
            self._batches[size] = _Batch(size, StepCosts(self._widths, like.costs if like else None), in_use)
        return self._batches[size]

    def _neighbour(self, size: int) -> _Batch | None:
        """The next smaller batch that is known, or else the next larger one."""
        smaller = [other for other in self._batches if other < size]
        return self._batches[max(smaller) if smaller else min(self._batches)] if self._batches else None

    def _rate(self, batch: _Batch, width: int) -> float:
        """Tokens a second of one request."""
        return self._acceptance.tokens(width) / batch.costs.seconds(width)

    def _decide(self, batch: _Batch) -> None:
        best = self._best(batch)
        if best is None or not self._is_certain(batch, best):
            return
        gain = self._rate(batch, best) / self._rate(batch, batch.in_use)
        self._changes.append(Change(batch.num_reqs, batch.in_use, best, gain))
        batch.in_use = best
        batch.costs.unsettle(best)

    def _best(self, batch: _Batch) -> int | None:
        """The measured width that promises most, if that is enough to leave the one in use."""
        best = max(batch.costs.measured(), key=lambda width: self._rate(batch, width))
        needed = WIDER_GAIN if best > batch.in_use else NARROWER_GAIN
        return best if self._rate(batch, best) > needed * self._rate(batch, batch.in_use) else None

    def _is_certain(self, batch: _Batch, best: int) -> bool:
        gain = self._rate(batch, best) / self._rate(batch, batch.in_use)
        return gain > CLEAR_GAIN or batch.costs.num_averaged(best) >= CERTAIN_STEPS

    def _to_probe(self, batch: _Batch) -> int | None:
        rivals = self._rivals(batch)
        unknown = [width for width in rivals if not batch.costs.num_averaged(width)]
        if unknown:
            debt = -self._credit / batch.costs.seconds(batch.in_use)
            return unknown[0] if debt < DEBT_STEPS else None
        better = self._best(batch)
        if better is not None and better != batch.in_use:
            return better
        if batch.costs.num_steps - batch.probed_at < PROBE_EVERY:
            return None
        width = min(rivals, key=batch.costs.measured_at)
        # Seconds by which its steps take longer than their tokens would with the width in use.
        loss = batch.costs.seconds(width) - self._acceptance.tokens(width) / self._rate(batch, batch.in_use)
        return width if PROBE_STEPS * loss <= self._credit else None

    def _rivals(self, batch: _Batch) -> list[int]:
        """Widths to compare the one in use with: plain, and the next ones; of plain, the best that drafts at all."""
        if not batch.in_use:
            return [max(self._widths[1:], key=lambda width: self._rate(batch, width))]
        place = self._widths.index(batch.in_use)
        return [0, *(width for width in self._widths[place - 1 : place + 2] if width not in (0, batch.in_use))]


def make_width(config: TargetConfig) -> Width:
    """As the config says."""
    return AutoWidth(config.widths) if config.widths else FixedWidth(config.num_draft_tokens)


def _sizes() -> Iterator[int]:
    """Batch sizes in steps of a third to a half."""
    yield from (1, 2)
    size = 4
    while True:
        yield size
        yield size * 3 // 2
        size *= 2
