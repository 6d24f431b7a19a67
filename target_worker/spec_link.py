"""Talks to the draft worker: one Propose per step for the whole batch, and what happens when it is gone."""

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from memsvc.rpc import Rpc
from memsvc.wire.base import WIRE_VERSION, Epoch, PageId, ReqId, unpack_tokens
from memsvc.wire.base import pack_tokens as pack
from memsvc.wire.spec import Drafted, DraftHello, DraftOpen, DraftReady, Propose
from target_worker.req import FeatureRows, Req

logger = logging.getLogger(__name__)

HELLO_INTERVAL_S = 1.0
HANG_S = 60.0
"""A draft that answers nothing for this long is killed: it might wake up and write into pages of others."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class DraftContract:
    """What both sides must agree on."""

    engine: str
    epoch: Epoch
    feature_dim: int
    feature_dtype: str
    block_size: int
    target_layer_ids: Sequence[int]


class SpecLink:
    """The draft as the target sees it: up or down, and what it has been told of each request.

    Nothing here raises when the draft dies: propose returns no drafts, and `poll` says once that a
    draft is (back) up, after which every open request has to be reset and told anew.
    """

    def __init__(self, rpc: Rpc, contract: DraftContract) -> None:
        self._rpc = rpc
        self._contract = contract
        self._hello_at = 0.0
        self._hello_sent = False
        self._ready: DraftReady | None = None
        self._pidfd = -1
        self._closes: list[ReqId] = []
        self.last: Drafted | None = None
        """Reply of the newest Propose, for its times."""

    @property
    def is_up(self) -> bool:
        """A draft answers."""
        return self._ready is not None

    def poll(self) -> bool:
        """Look for a draft while there is none. True once, when one has come up."""
        if self._ready is not None:
            if self._is_alive():
                return False
            self._lost("it died")
        now = time.monotonic()
        if now >= self._hello_at:
            self._hello_at = now + HELLO_INTERVAL_S
            self._send_hello()
        if not self._hello_sent:
            return False
        return self._welcome(self._receive(0.0))

    def _send_hello(self) -> None:
        c = self._contract
        # A draft that loads for very long finds a queue of these; only the newest is waited for.
        with contextlib.suppress(TimeoutError):
            self._rpc.send(DraftHello(WIRE_VERSION, c.engine, c.epoch, c.feature_dim, c.feature_dtype))
            self._hello_sent = True

    def _receive(self, timeout_s: float) -> object:
        """The reply, None if there is none yet, or the error if what came is no message."""
        try:
            return self._rpc.recv(timeout_s)
        except TimeoutError:
            return None
        except msgspec.DecodeError as error:
            return error

    def _welcome(self, reply: object) -> bool:
        if reply is None:
            return False
        self._hello_sent = False
        if not isinstance(reply, DraftReady):
            logger.error("draft refused reply=%s", reply)
            return False
        c = self._contract
        if reply.block_size != c.block_size or list(reply.target_layer_ids) != list(c.target_layer_ids):
            logger.error(
                "draft mismatch block_size=%d/%d taps=%s/%s",
                reply.block_size,
                c.block_size,
                reply.target_layer_ids,
                c.target_layer_ids,
            )
            return False
        try:
            self._pidfd = os.pidfd_open(reply.pid)
        except ProcessLookupError:
            return False
        self._ready = reply
        logger.info("draft up pid=%d instance=%d", reply.pid, reply.instance)
        return True

    def close(self, req: Req) -> None:
        """The draft forgets req with the next Propose. Call it for every request that was told of."""
        # A draft that is down has forgotten everybody by itself.
        if req.draft.is_open and self._ready is not None:
            self._closes.append(req.rid)
        req.draft.is_open = False
        req.draft.pending = None

    def propose(
        self, blocks: list[Req], known: Iterable[Req], clear: list[PageId], num_drafts: int
    ) -> dict[ReqId, list[int]]:
        """Write pending features of `known` (all open requests) and draft for `blocks`; {} if that failed."""
        known = list(known)
        if self._ready is None or not (blocks or self._closes or any(req.draft.pending for req in known)):
            return {}
        msg = self._message(blocks, known, clear, num_drafts)
        self._rpc.send(msg)
        reply = self._wait()
        if not isinstance(reply, Drafted):
            self._lost(f"reply={reply}")
            return {}
        self.last = reply
        self._closes = []
        clear.clear()
        self._book(msg, known)
        return self._split(reply, msg)

    def _wait(self) -> object:
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            reply = self._receive(_POLL_S)
            if reply is not None:
                return reply
            if not self._is_alive():
                return None
        assert self._ready is not None
        logger.error("draft hangs pid=%d seconds=%d: killing it", self._ready.pid, HANG_S)
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        select.select([self._pidfd], [], [])
        return None

    def _is_alive(self) -> bool:
        return not select.select([self._pidfd], [], [], 0)[0]

    def _lost(self, why: str) -> None:
        logger.warning("draft down, plain decode goes on: %s", why)
        os.close(self._pidfd)
        self._pidfd = -1
        self._ready = None
        self._closes = []
        self._hello_at = 0.0

    def _message(self, blocks: list[Req], known: list[Req], clear: list[PageId], num_drafts: int) -> Propose:
        msg = Propose(
            closes=self._closes,
            opens=[_open(req) for req in known if not req.draft.is_open],
            page_rids=[],
            page_idxs=[],
            page_ids=[],
            clear_pages=list(clear),
            write_rids=[],
            write_starts=[],
            write_lens=[],
            write_rows=[],
            num_drafts=num_drafts if blocks else 0,
            rids=[req.rid for req in blocks],
            anchors=[req.tokens[-1] for req in blocks],
            anchor_pos=[req.computed_len for req in blocks],
            new_tokens=[pack(req.tokens[req.draft.told_tokens :]) if req.draft.is_open else b"" for req in blocks],
        )
        for req in known:
            if req.draft.is_open:
                for idx in req.draft.changed:
                    msg.page_rids.append(req.rid)
                    msg.page_idxs.append(idx)
                    msg.page_ids.append(req.draft.pages[idx])
            if req.draft.pending is not None:
                _add_write(msg, req.rid, req.draft.pending)
        return msg

    def _book(self, msg: Propose, known: list[Req]) -> None:
        blocks = set(msg.rids)
        for req in known:
            draft = req.draft
            if not draft.is_open or req.rid in blocks:
                draft.told_tokens = len(req.tokens)
            draft.is_open = True
            draft.changed.clear()
            if draft.pending is not None:
                draft.written_len = draft.pending.start + draft.pending.num
                draft.pending = None

    @staticmethod
    def _split(reply: Drafted, msg: Propose) -> dict[ReqId, list[int]]:
        ids, k = unpack_tokens(reply.token_ids), msg.num_drafts
        assert len(ids) == k * len(msg.rids), f"{len(ids)} drafts for {len(msg.rids)} blocks of {k}"
        return {rid: ids[i * k : (i + 1) * k] for i, rid in enumerate(msg.rids)}


def _open(req: Req) -> DraftOpen:
    draft = req.draft
    return DraftOpen(
        req.rid, draft.written_len, draft.valid_from, draft.pages, req.prompt_len, pack(req.tokens), req.sampling
    )


def _add_write(msg: Propose, rid: ReqId, rows: FeatureRows) -> None:
    msg.write_rids.append(rid)
    msg.write_starts.append(rows.start)
    msg.write_lens.append(rows.num)
    msg.write_rows.append(rows.row)
