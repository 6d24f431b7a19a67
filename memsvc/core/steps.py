"""Steps: one scheduler step of one engine, applied in the order commit, freeze, reset_draft, close, reserve, open."""

from collections import Counter

from memsvc.core.checkpoints import Checkpoints
from memsvc.core.commit import Committer
from memsvc.core.config import PoolConfig
from memsvc.core.growth import Growth
from memsvc.core.ledger import Ledger
from memsvc.core.limbo import let_go_now, release_done, retire
from memsvc.core.opening import Opening
from memsvc.core.outcome import Outcome
from memsvc.core.pressure import Pressure
from memsvc.core.publish import Publisher
from memsvc.core.reqs import Req, Running
from memsvc.core.sessions import Client
from memsvc.core.store import PageStore
from memsvc.core.validate import check_step
from memsvc.wire.base import ReqId
from memsvc.wire.mem import Close, NoRoom, OpenReq, ResetDraft, Step, Stepped


class Steps:
    """Carries out steps. The parts it joins each know one thing."""

    def __init__(
        self,
        config: PoolConfig,
        store: PageStore,
        ledger: Ledger,
        running: Running,
        pressure: Pressure,
    ) -> None:
        self._config = config
        self._store = store
        self._ledger = ledger
        self._running = running
        self._pressure = pressure
        self._growth = Growth(config, store, ledger, running, pressure)
        self.opening = Opening(config, store, ledger, running)
        self._publisher = Publisher(store)
        self.checkpoints = Checkpoints(store, ledger)
        self._committer = Committer(store, self._publisher, self.checkpoints)
        self.num_steps = 0
        self.num_no_room = 0
        self.num_closes: Counter[str] = Counter()

    def handle(self, client: Client, step: Step) -> Stepped:
        """The reply, which is also kept for a repetition. Raises RequestError with nothing changed."""
        commits, reserves = check_step(client, step, self._config)
        client.last_num = step.num
        client.done_step = max(client.done_step, step.done_step)
        release_done(self._store, client)
        self._ledger.refused.pop(client.engine.name, None)
        out = Outcome()
        self._committer.commit(client, commits, out.remap)
        if step.freeze:
            closing: set[int] = {rid for part in step.closes for rid in part.rids}
            self.checkpoints.freeze(client, step.freeze, closing, out)
        if step.reset_draft:
            self._reset_draft(client, step.reset_draft)
        for part in step.closes:
            self._close(client, part)
        if step.closes and out.remap.rids:
            out.remap.keep(client.engine.reqs)
        if step.reserve:
            self._growth.reserve(client, step.reserve, reserves, out)
        if step.reset_draft:
            self._refill(client, step.reset_draft, out)
        if out.no_room is None:
            self._open(client, step.opens, out)
        return self._reply(client, step, out)

    def _reset_draft(self, client: Client, part: ResetDraft) -> None:
        for rid in part.rids:
            self._publisher.reset_draft(client, client.engine.reqs[rid])

    def _refill(self, client: Client, part: ResetDraft, out: Outcome) -> None:
        for rid in part.rids:
            req = client.engine.reqs.get(rid)
            if req is not None and req.missing:
                self._growth.refill(req, out)

    def _close(self, client: Client, part: Close) -> None:
        for rid in part.rids:
            for kind, page in self.end(client, client.engine.reqs[rid], part.reason):
                retire(self._store.pool, client, kind, page)

    def end(self, client: Client, req: Req, reason: str) -> list[tuple[int, int]]:
        """Take the request out of everything; returns its private pages (kind, page), still blocked."""
        del req.engine.reqs[req.rid]
        req.engine.incomplete.discard(req.rid)
        self._running.remove(req)
        self._pressure.flagged.pop(req.uid, None)
        self.num_closes[reason] += 1
        private = self._publisher.close(req)
        let_go_now(self._store, client, req)
        return private

    def _open(self, client: Client, opens: list[OpenReq], out: Outcome) -> None:
        for op in opens:
            answer = self.opening.open(client.engine, op)
            if isinstance(answer, NoRoom):
                out.open_no_room = answer
                return
            out.opened.append(answer)

    def _reply(self, client: Client, step: Step, out: Outcome) -> Stepped:
        pool = self._store.pool
        to_clear, pool.to_clear = pool.to_clear, []
        retract: list[ReqId] = []
        if self._pressure.flagged:
            retract = [req.rid for req in self._pressure.wanted_back() if req.engine is client.engine]
        reply = out.reply(step.num, to_clear, retract, self._config.retract_ms)
        self.num_steps += 1
        self.num_no_room += out.no_room is not None
        client.replies.append(reply)
        return reply
