"""Device times of a step's sections by events around them, read when they are there and waited for by nobody."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_MOST_PENDING = 64
"""Steps whose events are kept; older ones are forgotten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionTime:
    """One step that has ended."""

    number: int
    """As its begin gave it."""
    num_members: int
    context: int
    """Tokens of all members together, when the step had run."""
    us: dict[str, float]
    """Microseconds on the device by section; of sections that are repeated, their sums."""
    wait_us: float
    """Between the end of the step before and the begin of this one: the other side's turn, and both hand-overs."""


@dataclass(frozen=True, slots=True)
class _Pending:
    number: int
    members: Sequence[int]
    lengths: torch.Tensor
    """Pinned copy of all slots' lengths."""
    marks: list[tuple[str, torch.cuda.Event]]
    before: torch.cuda.Event | None
    """Where the step before ended."""


class SectionTimes:
    """Events of the newest steps. Its cost: an event a section, and graphs that are split where sections end."""

    def __init__(self, lengths: torch.Tensor, sections: Sequence[str]) -> None:
        """lengths: SlotState.length."""
        self._lengths = lengths
        self._sections = sections
        self._pending: deque[_Pending] = deque(maxlen=_MOST_PENDING)
        self._open: _Pending | None = None
        self._ended: torch.cuda.Event | None = None

    def begin(self, number: int, members: Sequence[int]) -> None:
        """What the current stream gets from now on is step `number`."""
        copy = torch.empty(self._lengths.shape, dtype=self._lengths.dtype, pin_memory=self._lengths.is_cuda)
        self._open = _Pending(number, members, copy, [], self._ended)
        self.mark("")

    def mark(self, section: str) -> None:
        """A section's work is all on the stream."""
        assert self._open is not None, f"section {section} outside a step"
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._open.marks.append((section, event))

    def end(self) -> None:
        """The step's work is all on the stream."""
        assert self._open is not None, "no step was begun"
        self._open.lengths.copy_(self._lengths, non_blocking=True)
        self.mark("")
        self._ended = self._open.marks[-1][1]
        self._pending.append(self._open)
        self._open = None

    def take_ended(self) -> Iterator[SectionTime]:
        """Every step that has ended since the last call, in order."""
        while self._pending and self._pending[0].marks[-1][1].query():
            done = self._pending.popleft()
            us = dict.fromkeys(self._sections, 0.0)
            for (_, before), (section, event) in zip(done.marks, done.marks[1:-1], strict=False):
                us[section] += before.elapsed_time(event) * 1e3
            context = int(done.lengths[list(done.members)].sum())
            wait_us = done.before.elapsed_time(done.marks[0][1]) * 1e3 if done.before is not None else 0.0
            yield SectionTime(
                number=done.number, num_members=len(done.members), context=context, us=us, wait_us=wait_us
            )
