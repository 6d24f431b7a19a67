"""Who has to give way when a reservation does not fit: exact, by playing the closes through."""

from memsvc.core.ledger import Growing, Ledger, Pages
from memsvc.core.limbo import Quarantine
from memsvc.core.page_states import PRIVATE
from memsvc.core.radix import Checkpoint, Node
from memsvc.core.reqs import Req, Running
from memsvc.core.sessions import Client, Sessions
from memsvc.core.store import PageStore
from memsvc.wire.mem import NoRoom


class Rehearsal:
    """The pool as it would be if some pages came back and some requests were closed. Changes nothing."""

    def __init__(self, store: PageStore) -> None:
        self._pool = store.pool
        self._kinds = store.kinds
        self._spare = list(store.pool.spare)
        self._frames = store.pool.frames_available
        self._blocked: dict[int, int] = {}
        self._node_refs: dict[Node, int] = {}
        self._page_refs: dict[tuple[int, int], int] = {}

    def fits(self, pages: Pages) -> bool:
        """As PageStore.fits."""
        short = 0
        for need, spare, per_frame in zip(pages, self._spare, self._pool.pages_per_frame, strict=True):
            short += -(-max(0, need - spare) // per_frame)
        return short <= self._frames

    def unblock(self, kind: int, page: int) -> None:
        """A blocked page becomes free or evictable."""
        per_frame = self._pool.pages_per_frame[kind]
        frame = page // per_frame
        blocked = self._blocked.get(frame, self._pool.num_blocked[frame]) - 1
        self._blocked[frame] = blocked
        if blocked:
            self._spare[kind] += 1
        else:
            self._spare[kind] -= per_frame - 1
            self._frames += 1

    def close(self, req: Req) -> None:
        """All that the request holds comes back, as far as nobody else holds it."""
        kinds, states = self._kinds, self._pool.state
        node = req.node
        while node.parent is not None:
            refs = self._node_refs[node] = self._node_refs.get(node, node.lock_ref) - 1
            if not refs:
                for page in node.columns[0]:
                    self.unblock(kinds.primary, page)
            node = node.parent
        for kind, table in enumerate(req.tables):
            first = req.num_published if kind == kinds.primary else req.aux_low[kind]
            for page in table[first:]:
                if not page:
                    continue
                if states[kind][page] == PRIVATE:
                    self.unblock(kind, page)
                else:
                    self._unlock(kind, page)
        if req.state_in is not None:
            self.unlock_checkpoint(req.state_in)

    def unlock_checkpoint(self, checkpoint: Checkpoint) -> None:
        """One holder less of a checkpoint."""
        for kind, pages in zip(self._kinds.states, checkpoint.pages, strict=True):
            for page in pages:
                self._unlock(kind, page)

    def _unlock(self, kind: int, page: int) -> None:
        refs = self._page_refs.get((kind, page), self._pool.refs[kind][page]) - 1
        self._page_refs[kind, page] = refs
        if not refs:
            self.unblock(kind, page)


class Pressure:
    """Answers a reservation that does not fit."""

    def __init__(
        self, store: PageStore, ledger: Ledger, running: Running, sessions: Sessions, ward: Quarantine
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._running = running
        self._sessions = sessions
        self._quarantine = ward
        self.flagged: dict[int, Req] = {}
        """Requests that their engine was asked to retract for another one's sake, by uid."""

    def wanted_back(self) -> list[Req]:
        """The flagged requests; one that has become the elder since may stay."""
        elder = self._running.elder
        if elder is not None and elder.uid in self.flagged:
            del self.flagged[elder.uid]
            elder.retract_at = 0.0
        return list(self.flagged.values())

    def resolve(self, client: Client, growth: Growing, retract_at: float) -> NoRoom:
        """Say what to wait for or whom to retract; flags requests of other engines with the deadline retract_at."""
        needs = [sum(column) for column in zip(*(self._ledger.needs(*row) for row in growth), strict=True)]
        rehearsal = Rehearsal(self._store)
        waiting_on = self._wait(rehearsal, growth)
        if waiting_on:
            return self._ledger.no_room(needs, [], waiting_on)
        closed = self.wanted_back()
        for req in closed:
            rehearsal.close(req)
        if closed and self._fits(rehearsal, growth, closed):
            return self._ledger.no_room(needs, [], "other engine")
        chosen = self._choose(rehearsal, growth, closed)
        victims = [req for req in chosen if req.engine is client.engine]
        for req in chosen:
            if req.engine is not client.engine:
                req.retract_at = retract_at
                self.flagged[req.uid] = req
        if len(chosen) > len(victims):
            return self._ledger.no_room(needs, victims, "other engine")
        if victims:
            return self._ledger.no_room(needs, victims, "")
        return self._last_rung(client, needs)

    def _wait(self, rehearsal: Rehearsal, growth: Growing) -> str:
        """Let the pages come back that do so by themselves; "limbo" or "quarantine" if these are enough."""
        for client in self._sessions.clients.values():
            for _, kind, page in client.limbo:
                rehearsal.unblock(kind, page)
            for _, _, checkpoint in client.leaving:
                rehearsal.unlock_checkpoint(checkpoint)
        if self._fits(rehearsal, growth, []):
            return "limbo"
        for ward in self._quarantine.wards:
            for kind, page in ward.pages:
                rehearsal.unblock(kind, page)
        return "quarantine" if self._fits(rehearsal, growth, []) else ""

    def _fits(self, rehearsal: Rehearsal, growth: Growing, closed: list[Req]) -> bool:
        uids = {req.uid for req in closed}
        rest = [(req, more) for req, more in growth if req.uid not in uids]
        return rehearsal.fits(self._ledger.demand(rest)) and not self._ledger.over_quota(rest, uids)

    def _choose(self, rehearsal: Rehearsal, growth: Growing, closed: list[Req]) -> list[Req]:
        """Lowest priority and newest first, until the rest fits. Never the elder."""
        chosen: list[Req] = []
        spared = {self._running.elder, *closed}
        candidates = sorted((r for r in self._running if r not in spared), key=lambda r: (r.priority, -r.uid))
        for account_only in (True, False):
            for req in [req for req in candidates if req not in chosen]:
                if account_only and not self._over(req, growth, [*closed, *chosen]):
                    continue
                if self._fits(rehearsal, growth, [*closed, *chosen]):
                    return chosen
                chosen.append(req)
                rehearsal.close(req)
        return chosen

    def _over(self, req: Req, growth: Growing, closed: list[Req]) -> bool:
        """Whether closing req helps an account that is past its quota."""
        if not self._ledger.has_quotas:
            return False
        over = self._ledger.over_quota(growth, {req.uid for req in closed})
        return any(account in over for account, _ in self._ledger.quotas(req.engine.name, req.salt))

    def _last_rung(self, client: Client, needs: Pages) -> NoRoom:
        """The elder is alone and has no room even so: its pages lie in too many frames.

        When everything has come back, it is named itself: closed and opened again it lies densely,
        and dense it fits (TooLarge was tested). This is the only time that the elder is a victim.
        """
        if self._quarantine.wards:
            return self._ledger.no_room(needs, [], "quarantine")
        if any(other.limbo for other in self._sessions.clients.values()):
            return self._ledger.no_room(needs, [], "limbo")
        alone = [req for req in self._running if req.engine is client.engine]
        assert len(alone) == len(self._running) == 1, f"{len(self._running)} run and none of them could give way"
        return self._ledger.no_room(needs, alone, "")
