"""States and rings of a hybrid target in a bench: where they stand before each verify."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from memsvc.device.slots import Stage
from target_worker.attention import Span
from target_worker.cuda.prompt_states import PromptRecur, PromptStates
from target_worker.cuda.prompts import PromptStep
from target_worker.cuda.states import DeviceStates
from target_worker.recurrence import DeltaSpan
from tests.bench.target_pages import PAGE_SIZE, SlotPages

EVERY = 4
"""One request of so many writes its states in the verify that is measured. That many do in a server, where requests get
four tokens a step and a page has 16; the others' stand at the last page edge already."""


def state_len(slot: int, context: int, block_size: int) -> int:
    """Tokens that the states of a slot have seen: up to the last page edge, or to the one before it.

    The latter is only so if the edge may have been passed by the newest block.
    """
    edge = context // PAGE_SIZE * PAGE_SIZE
    has_passed = slot % EVERY == 0 and edge and context - edge < block_size
    return edge - PAGE_SIZE if has_passed else edge


class SlotStates:
    """The states of all slots, as one of the Steps that share their pages sees them."""

    def __init__(self, states: DeviceStates, pages: Mapping[int, SlotPages], lens: Mapping[int, int]) -> None:
        """lens: tokens that they have seen, by slot."""
        self._states = states
        self._pages = pages
        self._lens = lens
        self._kept: list[torch.Tensor] = []

    @property
    def _moving(self) -> list[torch.Tensor]:
        """What steps write of the tables, and what `aim` writes."""
        tables = self._states.mirror.tables
        return [tables.state_in, tables.state_out, tables.state_len]

    def open(self, stage: Stage) -> None:
        """Enqueue: every slot has its pages."""
        for slot, pages in self._pages.items():
            self._states.linear.table.open(slot, state_out=pages.states, ring=pages.rings, state_in=pages.states_read)
        self._states.mirror.push(stage)
        lens = np.array([[slot, self._lens[slot]] for slot in self._pages], dtype=np.int32)
        slots, seen = stage(lens).unbind(1)
        self._states.mirror.tables.state_len.index_copy_(0, slots.long(), seen)
        self._kept = [table.clone() for table in self._moving]

    def reset(self) -> None:
        """Enqueue: the tables are as `open` left them."""
        for table, kept in zip(self._moving, self._kept, strict=True):
            table.copy_(kept)

    def aim(self) -> None:
        """Enqueue: until the next reset states are written where verifies will read them."""
        self._states.mirror.tables.state_out.copy_(self._kept[0])

    @contextmanager
    def standing(self, prompts: PromptStep, length: int) -> Iterator[None]:
        """Prompts within leave states at so many tokens; the rows after them stay in the rings."""
        plain = prompts._states
        assert plain is not None, "a dense target has no states"
        prompts._states = _Standing(plain, length)
        try:
            yield
        finally:
            prompts._states = plain


class _Standing(PromptStates):
    """Of requests whose states stay where they are."""

    def __init__(self, plain: PromptStates, length: int) -> None:
        super().__init__(plain.states, plain.rule, plain.stage)
        self._length = length

    def plan(self, spans: Sequence[Span]) -> PromptRecur:
        """See PromptStates."""
        return PromptRecur(
            self,
            [
                DeltaSpan(
                    table_row=span.table_row, state_len=self._length, start=span.start, num=span.num,
                    write_len=self._length, first=span.first,
                )
                for span in spans
            ],
        )  # fmt: skip
