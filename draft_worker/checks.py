"""Whether a Propose can be carried out, decided before anything changes.

What is wrong is told with numbers, but never with token ids: both sides log it.
"""

from dataclasses import dataclass, field

import numpy as np

from draft_worker.requests import Requests
from memsvc.wire.base import PageId, ReqId, unpack_tokens
from memsvc.wire.spec import DraftOpen, Propose


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the worker was built for."""

    max_drafts: int
    """Most drafts per block."""
    vocab_size: int
    """Token ids are below it."""
    window: int
    """Context tokens that are read, 0 = all."""
    first_page: int
    """Smallest real page id."""
    num_pages: int
    """Page ids are below it."""
    num_rows: int
    """Feature rows in the exchange."""


@dataclass(slots=True)
class _View:
    """A request as it will be at the point of the message that is being checked."""

    valid_from: int
    context_len: int
    num_tokens: int
    last_token: int
    pages: np.ndarray
    """Its row of the page table: shared until a page of it changes."""
    is_copy: bool = False


@dataclass(slots=True)
class ProposeCheck:
    """Walks through one Propose in the order of its effects, on a copy of what they touch."""

    limits: Limits
    requests: Requests
    msg: Propose
    _views: dict[ReqId, _View] = field(default_factory=dict)
    _closed: set[ReqId] = field(default_factory=set)

    def run(self) -> None:
        """Raise ValueError, with the numbers, if any part cannot be carried out."""
        self._columns()
        self._closes()
        self._opens()
        self._pages()
        self._writes()
        self._blocks()

    def _columns(self) -> None:
        msg = self.msg
        groups = {
            "page_rids, page_idxs, page_ids": (msg.page_rids, msg.page_idxs, msg.page_ids),
            "write_rids, write_starts, write_lens, write_rows": (
                msg.write_rids, msg.write_starts, msg.write_lens, msg.write_rows,
            ),
            "rids, anchors, anchor_pos, new_tokens": (msg.rids, msg.anchors, msg.anchor_pos, msg.new_tokens),
        }  # fmt: skip
        for names, columns in groups.items():
            lengths = [len(column) for column in columns]
            if len(set(lengths)) > 1:
                raise ValueError(f"{names} have {lengths} entries")

    def _closes(self) -> None:
        for rid in self.msg.closes:
            if rid in self._closed or rid not in self.requests:
                raise ValueError(f"close of rid {rid}, which is not open")
            self._closed.add(rid)

    def _opens(self) -> None:
        tables = self.requests.tables
        num_open = len(self.requests) - len(self._closed) + len(self.msg.opens)
        if num_open > tables.max_reqs:
            raise ValueError(f"{num_open} requests would be open, the draft was started for {tables.max_reqs}")
        for opened in self.msg.opens:
            if opened.rid in self._views or (opened.rid in self.requests and opened.rid not in self._closed):
                raise ValueError(f"open of rid {opened.rid}, which is open already")
            self._views[opened.rid] = self._opened(opened)

    def _opened(self, opened: DraftOpen) -> _View:
        tables = self.requests.tables
        tokens = unpack_tokens(opened.tokens)
        numbers = (0, opened.valid_from, opened.context_len, len(tokens))
        if list(numbers) != sorted(numbers) or not 0 < opened.prompt_len <= len(tokens):
            raise ValueError(
                f"open of rid {opened.rid}: valid_from {opened.valid_from}, context_len {opened.context_len},"
                f" prompt_len {opened.prompt_len} of {len(tokens)} tokens"
            )
        self._check_tokens(opened.rid, tokens)
        if len(opened.pages) > tables.max_pages:
            raise ValueError(f"open of rid {opened.rid}: {len(opened.pages)} pages, a row holds {tables.max_pages}")
        for page in opened.pages:
            self._check_page(page)
        pages = np.zeros(tables.max_pages, dtype=np.int64)
        pages[: len(opened.pages)] = opened.pages
        return _View(opened.valid_from, opened.context_len, len(tokens), tokens[-1], pages, is_copy=True)

    def _view(self, rid: ReqId, what: str) -> _View:
        view = self._views.get(rid)
        if view is not None:
            return view
        if rid in self._closed or rid not in self.requests:
            raise ValueError(f"{what} of rid {rid}, which is not open")
        req = self.requests[rid]
        pages = self.requests.tables.table[req.row].numpy()
        view = _View(req.valid_from, req.context_len, req.sampler.num_tokens, req.last_token, pages)
        self._views[rid] = view
        return view

    def _pages(self) -> None:
        msg = self.msg
        max_pages = self.requests.tables.max_pages
        for rid, idx, page in zip(msg.page_rids, msg.page_idxs, msg.page_ids, strict=True):
            view = self._view(rid, "page")
            if not 0 <= idx < max_pages:
                raise ValueError(f"page index {idx} of rid {rid} is outside [0, {max_pages})")
            self._check_page(page)
            if not view.is_copy:
                view.pages, view.is_copy = view.pages.copy(), True
            view.pages[idx] = page
        for page in msg.clear_pages:
            if page == 0:
                raise ValueError("page 0 cannot be cleared")
            self._check_page(page)

    def _check_page(self, page: PageId) -> None:
        limits = self.limits
        if page != 0 and not limits.first_page <= page < limits.num_pages:
            raise ValueError(f"page id {page} is outside [{limits.first_page}, {limits.num_pages})")

    def _check_tokens(self, rid: ReqId, tokens: list[int]) -> None:
        vocab_size = self.limits.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            num = sum(not 0 <= token < vocab_size for token in tokens)
            raise ValueError(f"rid {rid}: {num} of {len(tokens)} tokens lie outside the vocabulary of {vocab_size}")

    def _writes(self) -> None:
        msg, num_rows = self.msg, self.limits.num_rows
        for rid, start, num, row in zip(
            msg.write_rids, msg.write_starts, msg.write_lens, msg.write_rows, strict=True
        ):  # fmt: skip
            view = self._view(rid, "features")
            if num < 0 or row < 0 or row + num > num_rows:
                raise ValueError(f"features of rid {rid} in rows [{row}, {row + num}), the exchange has {num_rows}")
            if start != view.context_len:
                raise ValueError(f"features of rid {rid} start at {start}, its context ends at {view.context_len}")
            view.context_len += num
            self._check_slots(rid, view, start, view.context_len)

    def _check_slots(self, rid: ReqId, view: _View, start: int, end: int) -> None:
        """Tokens [start, end) have pages."""
        page_size = self.requests.tables.page_size
        if end > len(view.pages) * page_size:
            raise ValueError(f"rid {rid}: token {end - 1} is past a row of {len(view.pages)} pages of {page_size}")
        first = start // page_size
        part = view.pages[first : -(-end // page_size)]
        if start < end and not part.all():
            raise ValueError(f"rid {rid}: tokens [{start}, {end}) need pages, none at index {first + part.argmin()}")

    def _blocks(self) -> None:
        msg, limits = self.msg, self.limits
        if not 0 <= msg.num_drafts <= limits.max_drafts:
            raise ValueError(f"num_drafts is {msg.num_drafts}, this draft gives at most {limits.max_drafts}")
        if len(set(msg.rids)) != len(msg.rids):
            raise ValueError(f"{len(msg.rids)} blocks for {len(set(msg.rids))} requests")
        for rid, anchor, position, packed in zip(msg.rids, msg.anchors, msg.anchor_pos, msg.new_tokens, strict=True):
            view = self._view(rid, "block")
            tokens = unpack_tokens(packed)
            self._check_tokens(rid, tokens)
            num_tokens, last = view.num_tokens + len(tokens), tokens[-1] if tokens else view.last_token
            if num_tokens - 1 != position:
                raise ValueError(f"block of rid {rid}: anchor at {position}, its tokens end at {num_tokens - 1}")
            if last != anchor:
                raise ValueError(f"block of rid {rid}: the anchor at {position} is not the last of its tokens")
            if view.context_len != position:
                raise ValueError(f"block of rid {rid} at {position}, its context ends at {view.context_len}")
            start = max(view.valid_from, position - limits.window + 1) if limits.window else view.valid_from
            self._check_slots(rid, view, start, position)
