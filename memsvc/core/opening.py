"""Opening: a new request finds its cached prefix, and is admitted if its whole prompt fits."""

from itertools import count
from typing import cast

from memsvc.core.config import PoolConfig
from memsvc.core.ledger import Ledger, Pages, add
from memsvc.core.page_states import LIMBO, QUARANTINE
from memsvc.core.radix import TOKEN_BYTES, Node, checkpoints_up
from memsvc.core.reqs import Req, Running
from memsvc.core.sessions import Engine
from memsvc.core.store import PageStore
from memsvc.wire.base import PageId
from memsvc.wire.mem import NoRoom, Opened, OpenReq, TooLarge


class Opening:
    """Hits are locked before anything is allocated, so nothing that is allocated can evict them."""

    def __init__(self, config: PoolConfig, store: PageStore, ledger: Ledger, running: Running) -> None:

        self._config = config
        self._kinds = store.kinds
        self._store = store
        self._ledger = ledger
        self._running = running
        self._uids = count(1)
        self.hit_tokens = 0
        self.queried_tokens = 0
        self.draft_hit_short = 0
        self.state_short_tokens = 0
        self.num_opens = 0
        self.num_too_large = 0

    def open(self, engine: Engine, op: OpenReq) -> Opened | TooLarge | NoRoom:
        """Admit op, or say why not: never, or not now."""
        limit = len(op.tokens) // TOKEN_BYTES + op.max_new + self._config.slack_tokens
        too_large = self._ledger.too_large(engine, op, limit)
        if too_large is not None:
            self.num_too_large += 1
            return too_large
        root = self._store.tree.root(engine.fingerprint, op.salt)
        req = Req(next(self._uids), engine, op, root, self._kinds)
        req.limit = limit
        if self._must_wait():
            self._store.tree.forget_if_idle(root)
            return self._ledger.no_room(self._ledger.whole(engine, req.prompt_len), [], "watermark")
        hit = self._hit_limit(req)
        while True:
            self._lock_hit(req, hit)
            refusal = self._refusal(req)
            if refusal is None:
                return self._admit(req)
            hit = req.num_pages // 2
            self._unlock_hit(req)
            if not self._may_shorten(req, refusal):
                self._store.tree.forget_if_idle(root)
                return refusal

    def _must_wait(self) -> bool:
        """Whether opens are paused, now that the watermark was looked at. An empty pool always opens."""
        ledger = self._ledger
        if ledger.opens_paused and len(self._running):
            ledger.opens_paused = not ledger.free_share_ok(self._config.high_watermark, [0] * self._kinds.num_kinds)
        else:
            ledger.opens_paused = False
        return ledger.opens_paused

    def _hit_limit(self, req: Req) -> int:
        """Pages that may come from the cache: never the last prompt token, whose logits are wanted.

        A request with per-request pages but no kind of state has nothing to go on from: 0.
        """
        if not req.has_state and any(kind in req.engine.kinds for kind in self._kinds.per_req):
            return 0
        return (req.prompt_len - 1) // self._kinds.page_size

    # --- hits ---

    def _lock_hit(self, req: Req, num_pages: int) -> None:
        """Find and lock at most num_pages of the prompt, and the draft pages of the window at their end."""
        store, page_size = self._store, self._kinds.page_size
        tokens = bytes(req.tokens[: num_pages * store.tree.page_bytes])
        node, shared = store.tree.match(req.root, tokens, num_pages)
        req.num_matched = node.start + shared
        if req.has_state:
            node, shared = self._last_state(req, node)
        if 0 < shared < node.num_pages:
            node = store.split(node, shared)
        store.lock_path(node)
        if req.state_in is not None:
            store.lock_checkpoint(req.state_in)
        node.priority = max(node.priority, req.priority)
        req.node, hit = node, node.end
        columns = store.tree_pages(node, hit)
        req.tables[req.primary] = columns[0]
        req.num_published = req.aux_published = hit
        req.target_len = req.draft_len = hit * page_size
        usable = req.root.aux_label == req.aux_label
        lows = [store.window_start(kind, columns, hit) if usable else hit for kind in req.aux]
        low = max(lows, default=hit)
        for kind in req.aux:
            pages = columns[self._kinds.token.index(kind)][low:]
            store.lock_pages(kind, pages)
            req.tables[kind] = [0] * low + pages
            req.aux_low[kind] = low
        req.draft_valid_from = low * page_size
        req.settle(page_size)

    def _last_state(self, req: Req, node: Node) -> tuple[Node, int]:
        """Where the request can go on: the last checkpoint of the matched pages, or the root."""
        req.state_in = next(checkpoints_up(node, req.num_matched), None)
        if req.state_in is None:
            return req.root, 0
        node = req.state_in.node
        return node, req.state_in.at - node.start

    def _unlock_hit(self, req: Req) -> None:
        """Undo _lock_hit."""
        store = self._store
        for kind in req.aux:
            store.unlock_pages(kind, req.tables[kind][req.aux_low[kind] :])
            req.tables[kind] = []
        store.unlock_path(req.node)
        if req.aux:
            store.note_unlocked(req.node, req.draft_valid_from // self._kinds.page_size, req.num_published)
        if req.state_in is not None:
            store.unlock_checkpoint(req.state_in)
            req.state_in = None
        req.tables[req.primary] = []
        req.node = req.root

    # --- admission ---

    def _needs(self, req: Req) -> Pages:
        """Pages the request must be able to get: for its prompt, or for all of it if it will be the elder."""
        tokens = req.prompt_len if len(self._running) else req.limit
        needs = self._ledger.ahead(req, tokens)
        for kind in self._kinds.per_req:
            if kind in req.engine.kinds:
                needs[kind] = self._kinds.pages_per_req[kind]
        return needs

    def _refusal(self, req: Req) -> NoRoom | None:
        """NoRoom unless the request, the rest of the open prompts and the elder's rest fit together."""
        needs = self._needs(req)
        total = add(needs, self._ledger.promised())
        room = self._store.fits(total) and not self._ledger.over_quota_by([(req, needs)], set())
        if room and len(self._running):
            room = self._ledger.free_share_ok(self._config.low_watermark, needs)
        return None if room else self._ledger.no_room(needs, [], self._waiting_on())

    def _waiting_on(self) -> str:
        for counts in self._store.pool.counts:
            if counts[LIMBO]:
                return "limbo"
        return "quarantine" if any(counts[QUARANTINE] for counts in self._store.pool.counts) else ""

    def _may_shorten(self, req: Req, refusal: NoRoom) -> bool:
        """Alone in the pool a request fits densely, but a hit may lie in too many frames: try half of it then."""
        return not len(self._running) and not refusal.waiting_on and req.num_published > 0

    def _admit(self, req: Req) -> Opened:
        """The hit is locked and the needs fit: take the per-request pages and let it run."""
        store, needs = self._store, self._needs(req)
        req.root.num_users += 1  # before anything is evicted: the last path of the namespace may go
        ahead = add(needs, self._ledger.promised())
        for kind in self._kinds.per_req:
            req.tables[kind] = store.take(kind, needs[kind], ahead)
            for page in req.tables[kind]:
                store.pool.owner[kind][page] = req.uid
        req.opened_at = store.now
        req.engine.reqs[req.rid] = req
        self._running.add(req)
        if req.num_pages * self._kinds.page_size < req.prompt_len:
            self._running.filling[req.uid] = req
        self._count(req)
        return Opened(
            rid=req.rid,
            prefix_len=req.target_len,
            pages=cast("list[list[PageId]]", [list(table) for table in req.tables]),
            draft_valid_from=req.draft_valid_from,
            checkpoint_at=self._checkpoint_at(req),
            state_in=self._state_in(req),
        )

    def _checkpoint_at(self, req: Req) -> list[int]:
        """Where a state is worth storing: at the fork, before the prompt's last token, and at intervals."""
        if not req.has_state:
            return []
        page_size, interval = self._kinds.page_size, self._kinds.checkpoint_pages
        hit, last = req.num_published, (req.prompt_len - 1) // page_size
        places = {req.num_matched, last, *range((hit // interval + 1) * interval, last, interval)}
        return [place * page_size for place in sorted(places) if place > hit]

    def _state_in(self, req: Req) -> list[list[PageId]]:
        if req.state_in is None:
            return []
        found: list[list[int]] = [[] for _ in self._kinds.names]
        for kind, pages in zip(self._kinds.states, req.state_in.pages, strict=True):
            found[kind] = list(pages)
        return cast("list[list[PageId]]", found)

    def _count(self, req: Req) -> None:
        self.num_opens += 1
        self.queried_tokens += req.prompt_len
        self.hit_tokens += req.target_len
        self.state_short_tokens += req.num_matched * self._kinds.page_size - req.target_len
        node, parent = req.node, req.node.parent
        while parent is not None:
            node.hits += 1
            node, parent = parent, parent.parent
        window = max((self._kinds.windows[kind] or req.target_len for kind in req.aux), default=0)
        self.draft_hit_short += req.draft_valid_from > max(0, req.target_len - window)
