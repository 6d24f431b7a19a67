"""Ledger: what requests hold, still need and may have, as vectors of pages by kind."""

from memsvc.core.config import PoolConfig
from memsvc.core.kinds import KindTable
from memsvc.core.page_states import LIMBO
from memsvc.core.reqs import Req, Running
from memsvc.core.sessions import Engine
from memsvc.core.store import PageStore
from memsvc.wire.mem import NoRoom, OpenReq, TooLarge

Pages = list[int]
"""Number of pages by kind."""
Growing = list[tuple[Req, int]]
"""Requests, and how many more places each token kind's table is to have."""


class Ledger:
    """The arithmetic of admission. Nothing here changes a page."""

    def __init__(self, config: PoolConfig, kinds: KindTable, store: PageStore, running: Running) -> None:
        self._config = config
        self._kinds = kinds
        self._store = store
        self._running = running
        pool = store.pool
        self.usable_frames = pool.num_frames - pool.first_frame - config.pin_budget_frames
        """Frames that requests can count on."""
        self.opens_paused = False
        """A reservation found no room; opens wait for the high watermark."""
        self.refused: dict[str, Growing] = {}
        """By engine, the last reservation that found no room, until its next step."""

    def whole(self, engine: Engine, num_tokens: int) -> Pages:
        """All pages that a request of so many tokens holds at once when it is complete."""
        kinds = self._kinds
        tables = -(-num_tokens // kinds.page_size)
        needs = [0] * kinds.num_kinds
        for kind in kinds.token:
            if kind == kinds.primary or kind in engine.kinds:
                needs[kind] = min(tables, kinds.bounds[kind])
        for kind in kinds.per_req:
            if kind in engine.kinds:
                needs[kind] = kinds.pages_per_req[kind]
        return needs

    def ahead(self, req: Req, num_tokens: int) -> Pages:
        """Token pages that an open request will take until it has slots for num_tokens."""
        kinds = self._kinds
        more = -(-num_tokens // kinds.page_size) - req.num_pages
        needs = [0] * kinds.num_kinds
        needs[kinds.primary] = max(0, more)
        for kind in req.aux:
            lost = req.num_missing(kind) if req.missing else 0
            needs[kind] = max(0, min(more + lost, kinds.bounds[kind] - req.held(kind)))
        return needs

    def elder_ahead(self) -> Pages:
        """What is kept back for the elder to finish."""
        elder = self._running.elder
        return self.ahead(elder, elder.limit) if elder else [0] * self._kinds.num_kinds

    def promised(self) -> Pages:
        """What an open must leave: the elder's rest, the rest of the prompts of other open requests, which
        admission has counted, and what refused reservations wait for; else a request that was retracted
        for them would take their room again by opening anew.
        """
        total, elder = self.elder_ahead(), self._running.elder
        waiting = {req.uid: self.needs(req, more) for growth in self.refused.values() for req, more in growth}
        for uid in waiting.keys() | self._running.filling.keys():
            req = self._running.get(uid)
            if req is None or req is elder:
                continue
            prompt = self.ahead(req, req.prompt_len)
            pages = waiting.get(uid, prompt)
            total = add(total, [max(pair) for pair in zip(prompt, pages, strict=True)])
        return total

    def needs(self, req: Req, more: int) -> Pages:
        """Pages that a request takes for `more` places in each of its tables, and for those that lost theirs."""
        needs = [0] * self._kinds.num_kinds
        for kind in req.token_kinds:
            needs[kind] = more
        for kind, _ in req.missing:
            needs[kind] += 1
        return needs

    def demand(self, growth: Growing) -> Pages:
        """What must fit for this growth to be granted: it, and the elder's rest if anyone else grows."""
        elder, own = self._running.elder, [0] * self._kinds.num_kinds
        others = own[:]
        for req, more in growth:
            if req is elder:
                own = self.needs(req, more)
                continue
            for kind in req.token_kinds:
                others[kind] += more
            for kind, _ in req.missing:
                others[kind] += 1
        if not any(others):
            return own
        return add(others, [max(pair) for pair in zip(self.elder_ahead(), own, strict=True)])

    # --- limits ---

    def too_large(self, engine: Engine, op: OpenReq, limit: int) -> TooLarge | None:
        """Whether the request could not run even alone."""
        needs = self.whole(engine, limit)
        frames = self.dense_frames(needs)
        most = min([self.usable_frames, *(quota for _, quota in self.quotas(engine.name, op.salt))])
        if frames <= most:
            return None
        usable = [per_frame * most for per_frame in self._kinds.pages_per_frame]
        return TooLarge(rid=op.rid, needs=needs, usable=usable, frames_needed=frames, frames_usable=most)

    def dense_frames(self, pages: Pages) -> int:
        """Frames that these pages fill when packed."""
        return sum(-(-n // per_frame) for n, per_frame in zip(pages, self._kinds.pages_per_frame, strict=True))

    def quotas(self, engine: str, salt: str) -> list[tuple[tuple[str, str], int]]:
        """The accounts with a quota that a request belongs to, and their frames."""
        limits = []
        if engine in self._config.engine_quota_frames:
            limits.append((("engine", engine), self._config.engine_quota_frames[engine]))
        if salt in self._config.salt_quota_frames:
            limits.append((("salt", salt), self._config.salt_quota_frames[salt]))
        return limits

    @property
    def has_quotas(self) -> bool:
        """Whether anyone is limited."""
        return bool(self._config.engine_quota_frames or self._config.salt_quota_frames)

    def over_quota(self, growth: Growing, closed: set[int]) -> set[tuple[str, str]]:
        """Accounts that this growth would take past their quota, the requests in `closed` (uids) left out."""
        return (
            self.over_quota_by([(req, self.needs(req, more)) for req, more in growth], closed)
            if self.has_quotas
            else set()
        )

    def over_quota_by(self, growth: list[tuple[Req, Pages]], closed: set[int]) -> set[tuple[str, str]]:
        """The same for pages by kind."""
        if not self.has_quotas:
            return set()
        grows = {req.uid: pages for req, pages in growth if req.uid not in closed and any(pages)}
        touched = dict(q for req, _ in growth if req.uid in grows for q in self.quotas(req.engine.name, req.salt))
        held = {account: [0] * self._kinds.num_kinds for account in touched}
        for req in [*self._running, *(req for req, _ in growth if self._running.get(req.uid) is None)]:
            if req.uid in closed:
                continue
            pages = add([req.held(kind) for kind in range(self._kinds.num_kinds)], self._counted(req, grows))
            for account, _ in self.quotas(req.engine.name, req.salt):
                if account in held:
                    held[account] = add(held[account], pages)
        return {account for account, quota in touched.items() if self.dense_frames(held[account]) > quota}

    def _counted(self, req: Req, grows: dict[int, Pages]) -> Pages:
        own = grows.get(req.uid, [0] * self._kinds.num_kinds)
        if req is not self._running.elder or not grows.keys() - {req.uid}:
            return own
        return [max(pair) for pair in zip(own, self.ahead(req, req.limit), strict=True)]

    # --- answers ---

    def no_room(self, needs: Pages, victims: list[Req], waiting_on: str) -> NoRoom:
        """The reply with the pool's vectors filled in."""
        pool = self._store.pool
        has = [pool.available(kind) for kind in range(self._kinds.num_kinds)]
        limbo = [counts[LIMBO] for counts in pool.counts]
        return NoRoom(needs=needs, has=has, limbo=limbo, victims=[req.rid for req in victims], waiting_on=waiting_on)

    def free_share_ok(self, share: float, extra: Pages) -> bool:
        """Whether this share of the usable frames stays available after what is promised and `extra`."""
        kept = self._store.frames_short(add(self.promised(), extra))
        return self._store.pool.frames_available - kept >= share * self.usable_frames


def add(a: Pages, b: Pages) -> Pages:
    """The sum of two vectors."""
    return [x + y for x, y in zip(a, b, strict=True)]
