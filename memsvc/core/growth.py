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
        rows: list[tuple[Req, int]] = []
        for rid, num in zip(part.rids, part.nums, strict=True):
            req = reqs[rid]
            short = req.target_len + num - req.slots
            if short > 0 or req.missing:
                rows.append((req, -(-short // page_size) if short > 0 else 0))
        if not rows:
            return
        growth = [(req, self._needs(req, more)) for req, more in rows]
        demand = self._ledger.demand(growth)
        if self._store.fits(demand) and not self._ledger.over_quota(growth, set()):
            self._grant(rows, demand, out)
            return
        self._ledger.opens_paused = True
        self._ledger.refused[client.engine.name] = growth
        out.no_room = self._pressure.resolve(client, growth, retract_at)

    def _needs(self, req: Req, more: int) -> Pages:
        needs = [0] * self._kinds.num_kinds
        for kind in req.token_kinds:
            needs[kind] = more
        for kind, _ in req.missing:
            needs[kind] += 1
        return needs

    def _grant(self, rows: list[tuple[Req, int]], ahead: Pages, out: Outcome) -> None:
        """`more` pages of each token kind for each request. `ahead` fits and covers them."""
        for kind in self._kinds.token:
            growing = [(req, more) for req, more in rows if kind in req.token_kinds]
            taken = self._store.take(kind, sum(more for _, more in growing), ahead)
            owner, first = self._store.pool.owner[kind], 0
            for req, more in growing:
                pages, table = taken[first : first + more], req.tables[kind]
                for page in pages:
                    owner[page] = req.uid
                out.grow.add_run(req.rid, kind, len(table), pages)
                table += pages
                first += more
        page_size, filling = self._kinds.page_size, self._running.filling
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
        growth = [(req, self._needs(req, 0))]
        demand = self._ledger.demand(growth)
        if self._store.fits(demand) and not self._ledger.over_quota(growth, set()):
            self._fill(req, demand, out)
            return
        for kind, index in req.missing:
            out.remap.add(req, kind, index, 0)
