"""Turns the state of the running requests into one Step message, and applies the reply."""

from memsvc.client import MemoryClient
from memsvc.device.page_table import PageTables
from memsvc.registration import StepParts
from memsvc.wire.base import PageId, ReqId, pack_tokens
from memsvc.wire.mem import Close, Commit, Layout, Opened, OpenReq, Reserve, ResetDraft, Stepped, TooLarge
from target_worker.model.config import TARGET_KV
from target_worker.req import Phase, Req
from target_worker.state_link import StateLink

DRAFT_KV = "draft_kv"


class MemLink:
    """The one place that knows what memsvc has been told.

    `begin` sends a Step and may be followed by a forward; `finish` waits for the reply and applies
    page tables and lengths to the requests. Exactly one Step is on the way at a time.
    """

    def __init__(
        self, client: MemoryClient, layout: Layout, tables: PageTables, states: StateLink | None = None
    ) -> None:
        """states: needed by a hybrid target."""
        names = [kind.name for kind in layout.kinds]
        self._client = client
        self._layout = layout
        self._tables = tables
        self._states = states
        self._page_size = layout.page_size
        self._target_kind = names.index(TARGET_KV)
        self._draft_kind = names.index(DRAFT_KV) if DRAFT_KV in names else -1
        self._open: dict[ReqId, Req] = {}
        self._opening: list[Req] = []
        self.opened: list[Req] = []
        """Requests that the last Step opened."""
        self.closed: list[Req] = []
        """Requests that the last Step closed."""
        self.healed: list[Req] = []
        """Requests whose last missing draft page came: their draft has to be reset once more."""
        self._last_num = 0
        self.clear_target: list[PageId] = []
        """Pages of the last reply that the target zeroes before its next forward."""
        self.clear_draft: list[PageId] = []
        """Pages of the last reply that the draft zeroes before it writes again."""

    @property
    def has_draft_kind(self) -> bool:
        """The pool has draft pages at all."""
        return self._draft_kind >= 0

    @property
    def draft_window(self) -> int:
        """Tokens of context that the draft needs, 0 = all."""
        return self._layout.kinds[self._draft_kind].window if self.has_draft_kind else 0

    @property
    def num_open(self) -> int:
        """Requests that hold memory."""
        return len(self._open)

    def renew(self) -> None:
        """Keep the lease while there is nothing to say."""
        self._client.renew()

    def begin(self, reserve: list[tuple[Req, int]], opens: list[Req], closes: list[tuple[Req, str]]) -> None:
        """Send a Step: commit everything new, freeze states, then close, reserve (tokens from 0 on) and open."""
        self._opening = opens
        self.closed = [req for req, _ in closes]
        closing: dict[str, list[ReqId]] = {}
        for req, reason in closes:
            closing.setdefault(reason, []).append(req.rid)
        freeze = self._states.freeze(self._open.values(), self.closed) if self._states else None
        # The forward that ran beside the last Step is over, so nobody uses what that Step freed.
        self._client.begin_step(
            StepParts(
                done_step=self._last_num,
                commit=self._commit(),
                closes=[Close(rids, reason) for reason, rids in closing.items()],
                reserve=self._reserve(reserve),
                opens=[self._open_req(req) for req in opens],
                freeze=freeze,
            )
        )

    def reset_draft(self, reqs: list[Req]) -> None:
        """The draft lost its KV of reqs: commit, and let its context begin at what is computed now. Waits."""
        self._opening, self.closed = [], []
        if self._states:
            self._states.keep_up(self._open.values())
        reset = ResetDraft([req.rid for req in reqs]) if reqs and self.has_draft_kind else None
        self._client.begin_step(StepParts(done_step=self._last_num, commit=self._commit(), reset_draft=reset))
        self.healed = []
        for req in reqs:
            req.draft.reset(req.computed_len)
            req.told_draft_len = req.computed_len
        self.finish()

    def may_catch_up(self, req: Req) -> bool:
        """The state of req, which has ended, may follow what is computed, beside the next Step."""
        return self._states is None or self._states.may_catch_up(req)

    def _commit(self) -> Commit | None:
        commit = Commit([], [], [], [])
        for req in self._open.values():
            draft_len = min(req.draft.written_len, req.computed_len)
            if req.computed_len == req.told_len and draft_len <= req.told_draft_len:
                continue
            commit.rids.append(req.rid)
            commit.target_lens.append(req.computed_len)
            commit.draft_lens.append(max(draft_len, req.told_draft_len))
            commit.tokens.append(pack_tokens(req.tokens[req.told_tokens : req.computed_len]))
            req.told_len = req.computed_len
            req.told_draft_len = max(draft_len, req.told_draft_len)
            req.told_tokens = max(req.told_tokens, req.computed_len)
        return commit if commit.rids else None

    def _reserve(self, wanted: list[tuple[Req, int]]) -> Reserve | None:
        short = [(req, length) for req, length in wanted if length > req.allocated_len or req.draft.holes]
        if not short:
            return None
        return Reserve([req.rid for req, _ in short], [max(0, length - req.told_len) for req, length in short])

    def _open_req(self, req: Req) -> OpenReq:
        return OpenReq(req.rid, pack_tokens(req.tokens), req.num_left, req.salt, req.priority)

    def finish(self) -> Stepped:
        """Wait for the reply and apply it. Opened requests are in PREFILL then, TooLarge ones untouched."""
        stepped = self._client.finish_step()
        self._last_num = stepped.num
        for req in self.closed:
            self._forget(req)
        self.opened = []
        for req, answer in zip(self._opening, stepped.opened, strict=False):
            if isinstance(answer, Opened):
                self._adopt(req, answer)
                self.opened.append(req)
        # A request may be remapped and closed by one Step: its remap columns are then nobody's.
        if self._states:
            self._states.apply(stepped, self._open)
        self._set_pages(stepped.remap_rids, stepped.remap_kinds, stepped.remap_idxs, stepped.remap_pages)
        self._set_pages(stepped.grow_rids, stepped.grow_kinds, stepped.grow_idxs, stepped.grow_pages)
        # What nobody has zeroed since the reply before this one may be another's after the next Step: zeroing it late
        # would destroy that one's bytes. It may stay as it is, for no kernel uses a slot that was not written.
        self.clear_target, self.clear_draft = [], []
        for kind, page in zip(stepped.clear_kinds, stepped.clear_pages, strict=True):
            if kind == self._target_kind:
                self.clear_target.append(page)
            elif kind == self._draft_kind:
                self.clear_draft.append(page)
        return stepped

    def too_large(self, stepped: Stepped) -> list[tuple[Req, TooLarge]]:
        """Of the opens of the last Step, those that can never fit."""
        answers = zip(self._opening, stepped.opened, strict=False)
        return [(req, answer) for req, answer in answers if isinstance(answer, TooLarge)]

    def not_opened(self, stepped: Stepped) -> list[Req]:
        """Of the opens of the last Step, those that were not tried or did not fit now."""
        return self._opening[len(stepped.opened) :]

    def _adopt(self, req: Req, opened: Opened) -> None:
        req.row = self._tables.add(req.rid)
        req.phase = Phase.PREFILL
        req.computed_len = req.told_len = opened.prefix_len
        req.told_tokens = len(req.tokens)
        req.allocated_len = opened.prefix_len
        if req.cached_tokens < 0:
            req.cached_tokens = opened.prefix_len
        self._tables.set_row(req.rid, opened.pages[self._target_kind])
        req.draft.valid_from = opened.draft_valid_from
        req.draft.written_len = req.told_draft_len = opened.prefix_len
        if self.has_draft_kind:
            req.draft.pages = list(opened.pages[self._draft_kind])
        if self._states:
            self._states.adopt(req, opened)
        self._open[req.rid] = req

    def _forget(self, req: Req) -> None:
        if self._states:
            self._states.forget(req)
        self._tables.remove(req.rid)
        del self._open[req.rid]
        self.healed = [other for other in self.healed if other is not req]

    def _set_pages(self, rids: list[ReqId], kinds: list[int], idxs: list[int], pages: list[PageId]) -> None:
        for rid, kind, idx, page in zip(rids, kinds, idxs, pages, strict=True):
            req = self._open.get(rid)
            if req is None:
                continue
            if kind == self._target_kind:
                self._tables.set(rid, idx, page)
                req.allocated_len = max(req.allocated_len, (idx + 1) * self._page_size)
            elif kind == self._draft_kind:
                self._set_draft_page(req, idx, page)

    def _set_draft_page(self, req: Req, idx: int, page: PageId) -> None:
        pages = req.draft.pages
        pages.extend([PageId(0)] * (idx + 1 - len(pages)))
        pages[idx] = page
        if not page:
            req.draft.holes.add(idx)
            return
        req.draft.changed.append(idx)
        if idx in req.draft.holes:
            req.draft.holes.remove(idx)
            if not req.draft.holes:
                self.healed.append(req)

    def take_clear_target(self) -> list[PageId]:
        """The pages of clear_target, which is empty then."""
        pages, self.clear_target = self.clear_target, []
        return pages
