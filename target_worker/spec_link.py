"""Talks to the draft worker: one Propose per step for the whole batch, and what happens when it is gone."""

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from memsvc.rpc import Rpc
from memsvc.wire.base import WIRE_VERSION, BadRequest, Epoch, PageId, ReqId
from memsvc.wire.links import MAX_MSG_BYTES
from memsvc.wire.spec import Drafted, DraftHello, DraftReady, Propose
from target_worker.propose import book, make_propose, open_bytes, split
from target_worker.req import Req

logger = logging.getLogger(__name__)

HELLO_INTERVAL_S = 0.25
HANG_S = 60.0
"""A draft that answers nothing for this long is killed: it might wake up and write into pages of others."""
MAX_OPEN_BYTES = MAX_MSG_BYTES // 4
"""Most that requests told of at once may take in a message: the rest of it, and other codings, need room too."""
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

    def __init__(self, rpc: Rpc, contract: DraftContract, max_open_bytes: int = MAX_OPEN_BYTES) -> None:
        """max_open_bytes: requests to tell of that take more go out in several messages."""
        self._rpc = rpc
        self._contract = contract
        self._max_open_bytes = max_open_bytes
        self._hello_at = 0.0
        self._hello_sent = False
        self._ready: DraftReady | None = None
        self._pidfd = -1
        self._closes: list[ReqId] = []
        self.last: Drafted | None = None
        """Reply of the newest Propose, for its times."""
        self.on_wait: Callable[[], None] | None = None
        """Called again and again while a reply is waited for."""

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
            logger.error("draft refused reply=%s", _named(reply))
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
        req.draft.pending.clear()

    def propose(
        self, blocks: list[Req], known: Iterable[Req], clear: list[PageId], num_drafts: int
    ) -> dict[ReqId, list[int]]:
        """Write pending features of `known` (all open requests) and draft for `blocks`; {} if that failed."""
        known = list(known)
        if self._ready is None or not (blocks or self._closes or any(req.draft.pending for req in known)):
            return {}
        if not self._open_ahead(known, clear):
            return {}
        msg = make_propose(self._closes, blocks, known, clear, num_drafts)
        reply = self._ask(msg, known, clear)
        if reply is None:
            return {}
        self.last = reply
        return split(reply, msg)

    def _open_ahead(self, known: list[Req], clear: list[PageId]) -> bool:
        """Tell of as many requests that one more message has room for the rest of them. False if the draft was lost.

        A draft that comes up is told of every request at once, with all tokens of each.
        """
        waiting = [req for req in known if not req.draft.is_open]
        while sum(map(open_bytes, waiting)) > self._max_open_bytes and len(waiting) > 1:
            num_bytes, part = 0, []
            while len(waiting) > 1 and (not part or num_bytes + open_bytes(waiting[0]) <= self._max_open_bytes):
                num_bytes += open_bytes(waiting[0])
                part.append(waiting.pop(0))
            # Features of part are written with it, so what must be zeroed before goes with the first message.
            if self._ask(make_propose(self._closes, [], part, clear, 0), part, clear) is None:
                return False
        return True

    def _ask(self, msg: Propose, known: list[Req], clear: list[PageId]) -> Drafted | None:
        """The reply to a message made of known and clear, or None if the draft is lost with it."""
        self._rpc.send(msg)
        reply = self._wait()
        if not isinstance(reply, Drafted):
            self._lost(f"reply={_named(reply)}")
            return None
        self._closes = []
        clear.clear()
        book(msg, known)
        return reply

    def _wait(self) -> object:
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            reply = self._receive(_POLL_S)
            if reply is not None:
                return reply
            if not self._is_alive():
                return None
            if self.on_wait is not None:
                self.on_wait()
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


def _named(reply: object) -> str:
    """What came instead of the reply that was expected, for the log, which shall hold no tokens."""
    match reply:
        case BadRequest(reason):
            return f"BadRequest: {reason}"
        case msgspec.DecodeError():
            return f"no message: {reply}"
        case _:
            return type(reply).__name__
