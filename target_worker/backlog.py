"""Features that the draft has not been given yet: how long they may lie in the exchange."""

from collections.abc import Iterable

from target_worker.plan import StepPlan
from target_worker.req import Phase, Req

MOST_STEPS = 8
"""Plain steps whose features are written together. A message costs as much as the rows of about 30 tokens."""


class Backlog:
    """While nothing is drafted, features of several steps wait in rows of the exchange one after another.

    They are written when somebody needs them: before a block is drafted, so a draft always sees the whole
    context; when a request ends, for the next turn; and before memsvc can release the page they go to.
    """

    def __init__(self, num_rows: int, page_size: int, window: int) -> None:
        """num_rows: rows of the exchange. window: tokens of context that the draft needs, 0 = all."""
        self._num_rows = num_rows
        self._page_size = page_size
        # As memsvc counts them: a page that is in the window in part is held.
        self._window_pages = -(-window // page_size)
        self._next_row = 0
        self._num_steps = 0

    def is_due(self, plan: StepPlan, running: Iterable[Req]) -> bool:
        """What waits has to be written before the forward of `plan`, whose lengths memsvc has been told."""
        if not plan.decode or plan.num_drafts or self._num_steps >= MOST_STEPS:
            return True
        if self._next_row + plan.num_rows > self._num_rows:
            return True
        return any(req.draft.pending and (req.phase is Phase.FINISHED or self._leaves(req)) for req in running)

    def _leaves(self, req: Req) -> bool:
        """The page of its oldest waiting row is below the window, so the next Step may give it to somebody else."""
        if not self._window_pages:
            return False
        low = req.computed_len // self._page_size - self._window_pages
        return req.draft.pending[0].start // self._page_size < low

    def place(self, plan: StepPlan) -> int:
        """The exchange row at which the features of this forward begin."""
        row = self._next_row
        self._next_row += plan.num_rows
        self._num_steps += 1
        return row

    def clear(self) -> None:
        """Nothing waits any more: it was written, or nobody wants it."""
        self._next_row = self._num_steps = 0
