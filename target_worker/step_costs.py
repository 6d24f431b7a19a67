"""What a step costs at one batch size, by the number of drafts. No torch here.

Only the ratio of these costs matters, and a shared machine is fast at one moment and slow at the next. So the
width in use is the clock: a step of it moves the costs of all widths by the same factor, and a step of another
width, taken between two of it, moves its own cost alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

SETTLED_STEPS = 8
"""A width just taken into use is averaged over so many steps before it is the clock, and moves slowly after them."""
PROBED_STEPS = 8
"""Steps over which the cost of a width that is not in use is averaged."""
OUTLIER = 1.5
"""A step counts as this many times its cost at most, and as one part of it at least. Of the first two the faster one
is believed: others can slow a step down, but never speed it up."""
PROMPT_MEMORY = 256
"""Steps with prompt tokens after which a pair of them counts for 1 / e."""


@dataclass(slots=True)
class _Cost:
    seconds: float = 0.0
    """0 = no step was measured."""
    num_steps: int = 0
    """Steps averaged in it; 0 with a cost is one step right after another width."""
    at: int = 0
    """Step at which the width was last measured."""


class StepCosts:
    """Seconds of a step for each width, without what its prompt tokens take."""

    def __init__(self, widths: Iterable[int], like: "StepCosts | None" = None) -> None:
        """widths ascending. like: costs of another batch size, whose ratios hold until two are known here."""
        self._costs = {width: _Cost() for width in widths}
        self._like = like
        self.num_steps = 0
        """Steps measured, of any width."""

    def add(self, width: int, seconds: float, *, in_use: bool, is_first: bool) -> None:
        """A step of this width. is_first: the step before it had another one.

        Such a step pays for cold caches and for features that waited, so it counts only as long as there is no other.
        """
        self.num_steps += 1
        cost = self._costs[width]
        cost.at = self.num_steps
        if is_first:
            if not cost.num_steps:
                cost.seconds = seconds
            return
        if cost.num_steps == 1:
            cost.seconds = min(cost.seconds, seconds * OUTLIER)
        elif cost.num_steps:
            seconds = max(seconds, cost.seconds / OUTLIER)
        if cost.num_steps:
            seconds = min(seconds, cost.seconds * OUTLIER)
        if in_use and cost.num_steps >= SETTLED_STEPS:
            self._scale(1 + (seconds / cost.seconds - 1) / SETTLED_STEPS)
            return
        cost.num_steps = min(cost.num_steps + 1, SETTLED_STEPS if in_use else PROBED_STEPS)
        cost.seconds += (seconds - cost.seconds) / cost.num_steps

    def _scale(self, factor: float) -> None:
        for cost in self._costs.values():
            cost.seconds *= factor

    def unsettle(self, width: int) -> None:
        """The width is taken into use: its next steps decide."""
        self._costs[width].num_steps = min(self._costs[width].num_steps, 1)

    def num_averaged(self, width: int) -> int:
        """Steps that the cost of a width rests on."""
        return self._costs[width].num_steps

    def measured_at(self, width: int) -> int:
        """Number of the step at which the width was last measured, 0 if it never was."""
        return self._costs[width].at

    def measured(self) -> list[int]:
        """Widths whose cost rests on at least one step, ascending."""
        return [width for width, cost in self._costs.items() if cost.num_steps]

    def seconds(self, width: int) -> float:
        """Cost of a width; one without is estimated on the line through its measured neighbours."""
        if self._costs[width].seconds:
            return self._costs[width].seconds
        known = self.measured()
        if not known:
            return self._like.seconds(width) if self._like else 1.0
        if len(known) == 1:
            ratio = self._like.seconds(width) / self._like.seconds(known[0]) if self._like else 1.0
            return self._costs[known[0]].seconds * ratio
        above = next((index for index, other in enumerate(known) if other > width), len(known) - 1)
        low, high = known[max(0, above - 1)], known[max(1, above)]
        first, second = self._costs[low].seconds, self._costs[high].seconds
        return max(min(first, second), first + (second - first) / (high - low) * (width - low))


class PromptCost:
    """Seconds that a prompt token adds to a step, from steps next to each other that differ in nothing else."""

    def __init__(self) -> None:
        self._rows_seconds = 0.0
        self._rows_rows = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """So many more prompt tokens than in the step before took so many more seconds; both may be negative."""
        if rows:
            keep = 1 - 1 / PROMPT_MEMORY
            self._rows_seconds = self._rows_seconds * keep + rows * seconds
            self._rows_rows = self._rows_rows * keep + rows * rows

    @property
    def seconds(self) -> float:
        """The least-squares slope of the differences; 0 before there are any."""
        return max(0.0, self._rows_seconds / self._rows_rows) if self._rows_rows else 0.0
