"""The recurrent side of the model: what state pages hold, and which checkpoints there must be."""

from dataclasses import dataclass, field
from typing import Any

from tests.support.mem_builders import PAGE_SIZE

Namespace = tuple[str, str]
"""Model and salt."""
Prefix = tuple[int, ...]
Page = tuple[int, int]
"""kind, page"""

MAX_NEAR = 2


@dataclass
class StateOf:
    """The state of one request as its worker keeps it.

    It stands at `at` tokens: in the frozen pages `reads`, or, once the worker has written it itself
    (`is_live`), in the live pages of the request's tables.
    """

    at: int = 0
    reads: list[Page] = field(default_factory=list)
    reads_at: int = 0
    is_live: bool = False
    due: int = 0
    """The forward of this step writes the state at so many tokens."""
    from_at: int = 0
    """Freezing makes sense past here only."""
    held: Prefix | None = None
    """The checkpoint that the service keeps for it."""
    leaving: list[tuple[int, Prefix]] = field(default_factory=list)
    """(step, checkpoint) let go of by that step."""

    @property
    def can_freeze(self) -> bool:
        """The worker has a state of its own that stands past the one it came from."""
        return self.is_live and self.at > self.from_at

    def advance(self, boundary: int, step: int, at: int) -> None:
        """The commit of `step` passes the page edge `boundary`; the state stands at `at` now or after its forward."""
        if self.reads and boundary >= self.reads_at + PAGE_SIZE and self.held is not None:
            self.leaving.append((step, self.held))
            self.held = None
        if at > self.at:
            self.at, self.is_live, self.reads = at, True, []
        else:
            self.due = boundary

    def launched(self) -> None:
        """The forward of this step runs: what was due will have been written when the next step is sent."""
        if self.due:
            self.at, self.is_live, self.due, self.reads = self.due, True, 0, []

    def exchanged(self, pages: list[Page], prefix: Prefix, step: int) -> None:
        """The live pages were frozen; others are there to be written."""
        if self.held is not None:
            self.leaving.append((step, self.held))
        self.held, self.from_at, self.is_live = prefix, self.at, False
        self.reads, self.reads_at = pages, self.at

    def holds(self, done: int) -> set[Prefix]:
        """Checkpoints that the service must not give up for its sake."""
        found = {prefix for step, prefix in self.leaving if step > done}
        return found if self.held is None else found | {self.held}


class Frozen:
    """Which checkpoints there are, per namespace, as long as nothing is evicted: the oracle for recurrent hits."""

    def __init__(self, interval_pages: int) -> None:
        self._interval = interval_pages * PAGE_SIZE
        self.ever: dict[Namespace, set[Prefix]] = {}
        self.now: dict[Namespace, set[Prefix]] = {}

    @property
    def num(self) -> int:
        """Over all namespaces."""
        return sum(len(prefixes) for prefixes in self.now.values())

    def hit(self, space: Namespace, tokens: list[int], limit: int) -> int:
        """Expected prefix_len where target pages are there up to `limit`."""
        return max(
            (len(p) for p in self.now.get(space, ()) if len(p) <= limit and p == tuple(tokens[: len(p)])), default=0
        )

    def add(self, space: Namespace, prefix: Prefix, published: set[Any], held: set[Prefix]) -> bool:
        """A state was frozen; False if there is one already. Thins out the path, but for what is held."""
        now = self.now.setdefault(space, set())
        if prefix in now:
            return False
        self.ever.setdefault(space, set()).add(prefix)
        now -= self._too_many(space, prefix, published) - held
        now.add(prefix)
        return True

    def _too_many(self, space: Namespace, newest: Prefix, published: set[Any]) -> set[Prefix]:
        """All but forks, the nearest two within one interval, and the farthest of each doubling of the distance."""
        groups: dict[int, list[Prefix]] = {}
        for prefix in sorted(self.now[space], key=len, reverse=True):
            if prefix == newest[: len(prefix)] and num_branches(space, prefix, published) < 2:
                group = ((len(newest) - len(prefix)) // self._interval).bit_length()
                groups.setdefault(group, []).append(prefix)
        return {p for group, found in groups.items() for p in (found[:-1] if group else found[MAX_NEAR:])}


def num_branches(space: Namespace, prefix: Prefix, published: set[Any]) -> int:
    """Different pages that were published right after this prefix."""
    end = len(prefix) + PAGE_SIZE
    return len(
        {t[-PAGE_SIZE:] for m, s, t in published if (m, s) == space and len(t) == end and t[:-PAGE_SIZE] == prefix}
    )
