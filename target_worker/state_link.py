"""Recurrent states of the open requests: in which pages they are, and which of them become checkpoints."""

from collections.abc import Callable, Iterable

from memsvc.device.state_table import StateTable
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import Freeze, Layout, Opened, Stepped
from target_worker.model.config import RING, STATE
from target_worker.req import RecurrentState, Req


class StateLink:
    """What MemLink needs for a hybrid target: it keeps the StateTable and asks for the freezes.

    A state is frozen while no forward writes it: the planner leaves its request out of the one that runs
    beside the Step. What was frozen stays readable until the request has written a state elsewhere.
    """

    def __init__(self, layout: Layout, table: StateTable, catch_up: Callable[[list[Req]], None]) -> None:
        """catch_up brings the states of requests to the last page edge of what is computed."""
        self._page_size = layout.page_size
        names = [kind.name for kind in layout.kinds]
        self._state_kind, self._ring_kind = names.index(STATE), names.index(RING)
        self._table = table
        self._catch_up = catch_up
        self._asked: dict[ReqId, int] = {}

    def adopt(self, req: Req, opened: Opened) -> None:
        """The request was opened and has its row."""
        states, rings = opened.pages[self._state_kind], opened.pages[self._ring_kind]
        state_in = opened.state_in[self._state_kind] if opened.state_in else []
        self._table.open(req.row, state_out=states, ring=rings, state_in=state_in)
        req.state = RecurrentState(opened.prefix_len, opened.prefix_len, list(opened.checkpoint_at))

    def forget(self, req: Req) -> None:
        """The request is closed, and still has its row."""
        self._table.close(req.row)

    def freeze(self, running: Iterable[Req], closing: list[Req]) -> Freeze | None:
        """States for the next Step to keep: of those that close, as far as they are computed, and at checkpoints."""
        gone = set(closing)
        # One that is due stays: an identical prompt can't go on from the edge after it, if the text ends there.
        behind = [req for req in running if self.is_let_go(req) or (req in gone and not _is_due(req))]
        self._asked = {}
        self._catch_up(behind)
        for req in running:
            state = req.state
            assert state is not None, f"rid {req.rid} is open without a state"
            # An aborted one's may have come further than what counts.
            is_final = state.frozen_len < state.length <= req.computed_len
            if is_final and (req in gone or state.length in state.wanted):
                self._asked[req.rid] = state.length
            state.wanted = [length for length in state.wanted if length > state.length]
        return Freeze(list(self._asked), list(self._asked.values())) if self._asked else None

    def keep_up(self, running: Iterable[Req]) -> None:
        """To be called before every Step without freezes: memsvc may let go of what the Step before it passed."""
        behind = [req for req in running if self.is_let_go(req)]
        self._asked = {}
        self._catch_up(behind)

    def may_catch_up(self, req: Req) -> bool:
        """The next Step neither unlocks the state that it reads nor asks for it where it stands."""
        return not self.is_let_go(req) and not _is_due(req)

    def is_let_go(self, req: Req) -> bool:
        """It still reads a frozen state that the next Step unlocks.

        That is one which the Step before it has committed a whole page past. Mostly a forward has written another
        since, for that page's last row was final; but none runs beside a Step that only makes room. What that Step
        itself has frozen, behind its commits, is held until one commits after it.
        """
        state = req.state
        return (
            state is not None
            and 0 < state.length <= req.told_len - self._page_size
            and self._table.is_borrowed(req.row)
            and self._asked.get(req.rid) != state.length
        )

    def apply(self, stepped: Stepped, running: dict[ReqId, Req]) -> None:
        """Take over the pages that replace frozen ones."""
        fresh: dict[ReqId, list[PageId]] = {}
        for rid, kind, page in zip(stepped.remap_rids, stepped.remap_kinds, stepped.remap_pages, strict=True):
            if kind == self._state_kind:
                fresh.setdefault(rid, []).append(page)
        for rid, pages in fresh.items():
            req = running.get(rid)
            if req is not None and req.state is not None:
                self._table.freeze(req.row, pages)
                req.state.frozen_len = self._asked[rid]


def _is_due(req: Req) -> bool:
    return req.state is not None and req.state.is_due
