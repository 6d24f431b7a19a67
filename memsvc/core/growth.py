"""Growth: reservations of a step, all requests or none, and pages for places that lost theirs."""

from memsvc.core.config import PoolConfig
from memsvc.core.ledger import Growing, Ledger, Pages
from memsvc.core.outcome import Outcome
from memsvc.core.pressure import Pressure
from memsvc.core.reqs import Req, Running
from memsvc.core.sessions import Client
from memsvc.core.store import PageStore
from memsvc.core.validate import ReserveRow
from memsvc.wire.mem import Reserve


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

    def reserve(self, client: Client, part: Reserve, rows: list[ReserveRow], out: Outcome) -> None:
        """Slots for every row, and pages for places of part's requests that lost theirs; or out.no_room."""
        page_size = self._page_size
        growth: Growing = [(req, -(-(want - req.slots) // page_size)) for req, want in rows]
        incomplete = client.engine.incomplete
        if incomplete:
            asked = incomplete.intersection(part.rids).difference([req.rid for req, _ in rows])
            growth += [(client.engine.reqs[rid], 0) for rid in sorted(asked)]
        if not growth:
            return
        demand = self._ledger.demand(growth)
        if self._store.fits(demand) and not self._ledger.over_quota(growth, set()):
            self._grant(growth, demand, out)
            return
        self._ledger.opens_paused = True
        self._ledger.refused[client.engine.name] = growth
        out.no_room = self._pressure.resolve(client, growth, self._store.now + self._retract_s)

    def _grant(self, growth: Growing, ahead: Pages, out: Outcome) -> None:
        """More places in all tables of each request. `ahead` fits and covers them."""
        grow = out.grow
        everyone = [req for req, more in growth for _ in range(more)]
        for kind in self._store.kinds.token:
            takers = [req for req in everyone if kind in req.token_kinds]
            pages, owner = self._store.take(kind, len(takers), ahead), self._store.pool.owner[kind]
            for place, page in enumerate(pages):
                req = takers[place]
                table = req.tables[kind]
                grow.rids.append(req.rid)
                grow.idxs.append(len(table))
                table.append(page)
                owner[page] = req.uid
            grow.kinds += [kind] * len(pages)
            grow.pages += pages
        page_size, filling = self._page_size, self._running.filling
        for req, more in growth:
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
        req.engine.incomplete.discard(req.rid)

    def refill(self, req: Req, out: Outcome) -> None:
        """Pages for what reset_draft took, if there is room; else the places read 0 until a reservation fills them."""
        growth: Growing = [(req, 0)]
        demand = self._ledger.demand(growth)
        if self._store.fits(demand) and not self._ledger.over_quota(growth, set()):
            self._fill(req, demand, out)
            return
        for kind, index in req.missing:
            out.remap.add(req, kind, index, 0)
