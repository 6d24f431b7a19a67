"""Growth: reservations of a step, all requests or none, and pages for places that lost theirs."""

from memsvc.core.ledger import Ledger, Pages
from memsvc.core.outcome import Outcome
from memsvc.core.pressure import Pressure
from memsvc.core.reqs import Req, Running
from memsvc.core.sessions import Client
from memsvc.core.store import PageStore
from memsvc.wire.mem import Reserve


class Growth:
    """Gives running requests their next pages."""

    def __init__(self, store: PageStore, ledger: Ledger, running: Running, pressure: Pressure) -> None:
        self._kinds = store.kinds
        self._store = store
        self._ledger = ledger
        self._running = running
        self._pressure = pressure

    def reserve(self, client: Client, part: Reserve, out: Outcome, retract_at: float) -> None:
        """Slots for every request of part, or out.no_room."""
        page_size, reqs = self._kinds.page_size, client.engine.reqs
        growth: list[tuple[Req, Pages]] = []
        for rid, num in zip(part.rids, part.nums, strict=True):
            req = reqs[rid]
            more = -(-(req.target_len + num) // page_size) - len(req.tables[req.primary])
            if more > 0 or req.missing:
                growth.append((req, self._needs(req, max(0, more))))
        if not growth:
            return
        if self._store.fits(demand := self._ledger.demand(growth)) and not self._ledger.over_quota(growth, set()):
            self._grant(growth, demand, out)
            return
        self._ledger.opens_paused = True
        self._ledger.refused[client.engine.name] = growth
        out.no_room = self._pressure.resolve(client, growth, retract_at)

    def _needs(self, req: Req, more: int) -> Pages:
        needs = [0] * self._kinds.num_kinds
        needs[req.primary] = more
        for kind in req.aux:
            needs[kind] = more + req.num_missing(kind) if req.missing else more
        return needs

    def _grant(self, growth: list[tuple[Req, Pages]], ahead: Pages, out: Outcome) -> None:
        """`ahead` fits and covers the growth."""
        take, grow = self._store.take, out.grow
        for req, pages in growth:
            more = pages[req.primary]
            if req.missing:
                self._fill(req, ahead, out)
            for kind in req.token_kinds:
                table = req.tables[kind]
                for _ in range(more):
                    page = take(kind, req.uid, ahead)
                    grow.add(req, kind, len(table), page)
                    table.append(page)
            if req.num_pages * self._kinds.page_size >= req.prompt_len:
                self._running.filling.pop(req.uid, None)

    def _fill(self, req: Req, ahead: Pages, out: Outcome) -> None:
        for kind, index in req.missing:
            page = self._store.take(kind, req.uid, ahead)
            req.tables[kind][index] = page
            out.remap.add(req, kind, index, page)
        req.missing = []

    def refill(self, req: Req, out: Outcome) -> None:
        """Pages for what reset_draft took, if there is room; else the places read 0 until a reservation fills them."""
        growth = [(req, self._needs(req, 0))]
        demand = self._ledger.demand(growth)
        if self._store.fits(demand) and not self._ledger.over_quota(growth, set()):
            self._fill(req, demand, out)
            return
        for kind, index in req.missing:
            out.remap.add(req, kind, index, 0)
