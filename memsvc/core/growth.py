"""Growth: reservations of a step, all requests or none, and pages for places that lost theirs."""

from memsvc.core.config import PoolConfig
from memsvc.core.ledger import Growing, Ledger, Pages
from memsvc.core.outcome import Outcome
from memsvc.core.pressure import Pressure
from memsvc.core.reqs import Req, Running
from memsvc.core.sessions import Client
from memsvc.core.store import PageStore
from memsvc.core.validate import ReserveRow


class Growth:
    """Gives running requests their next pages."""

    def __init__(
        self, config: PoolConfig, store: PageStore, ledger: Ledger, running: Running, pressure: Pressure
    ) -> None:
        self._retract_s = config.retract_ms / 1000
        self._page_size = config.page_size
        self._store = store
        self._ledger = ledger
        self._running = running
        self._pressure = pressure

    def reserve(self, client: Client, rows: list[ReserveRow], out: Outcome) -> None:
        """Slots for every row, or out.no_room."""
        page_size = self._page_size
        growth: Growing = [
            (req, -(-(want - req.slots) // page_size) if want > req.slots else 0)
            for req, want in rows
            if want > req.slots or req.missing
        ]
        if not growth:
            return
        demand = self._ledger.demand(growth)
        if self._store.fits(demand) and not self._ledger.over_quota(growth, set()):
            self._grant(growth, demand, out)
            return
        self._ledger.opens_paused = True
        self._ledger.refused[client.engine.name] = growth
        out.no_room = self._pressure.resolve(client, growth, self._store.now + self._retract_s)

    def _grant(self, rows: Growing, ahead: Pages, out: Outcome) -> None:
        """`more` pages of each token kind for each request. `ahead` fits and covers them."""
        for kind in self._store.kinds.token:
            growing = [(req, more) for req, more in rows if kind in req.token_kinds]
            taken = self._store.take(kind, sum([more for _, more in growing]), ahead)
            owner, first = self._store.pool.owner[kind], 0
            for req, more in growing:
                table = req.tables[kind]
                for page in (pages := taken[first : first + more]):
                    owner[page] = req.uid
                out.grow.add_run(req.rid, kind, len(table), pages)
                table += pages
                first += more
        page_size, filling = self._page_size, self._running.filling
        for req, more in rows:
            req.slots += more * page_size
            if req.missing:
                self._fill(req, ahead, out)
            if req.uid in filling and req.slots >= req.prompt_len:
                del filling[req.uid]

    def _fill(self, req: Req, ahead: Pages, out: Outcome) -> None:
        for kind, index in req.missing:
            [page] = self._store.take(kind, 1, ahead)
            self._store.pool.owner[kind][page] = req.uid
            req.tables[kind][index] = page
            out.remap.add(req, kind, index, page)
        req.missing = []

    def refill(self, req: Req, out: Outcome) -> None:
        """Pages for what reset_draft took, if there is room; else the places read 0 until a reservation fills them."""
        growth: Growing = [(req, 0)]
        demand = self._ledger.demand(growth)
        if self._store.fits(demand) and not self._ledger.over_quota(growth, set()):
            self._fill(req, demand, out)
            return
        for kind, index in req.missing:
            out.remap.add(req, kind, index, 0)
