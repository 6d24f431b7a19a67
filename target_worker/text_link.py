"""Requests in from the tokenizer, tokens out to it, counters out to the front."""

import time
from pathlib import Path

import zmq

from memsvc.inbox import PullInbox
from memsvc.transport import bind, connect
from memsvc.wire import links
from memsvc.wire.base import FinishReason, ReqId
from memsvc.wire.base import pack_tokens as pack
from memsvc.wire.codec import encode
from memsvc.wire.text import Abort, Admit, EngineStats, Failed, TokensOut
from target_worker.req import Req

STATS_INTERVAL_S = 0.25


class TextLink:
    """Outputs of a step leave as one message. A garbage frame is counted, logged and dropped."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: Path) -> None:
        self.inbox = PullInbox(bind(context, links.TOK_TARGET, run_dir), links.TOK_TARGET)
        self._outbox = connect(context, links.TARGET_TOK, run_dir)
        self._stats_out = connect(context, links.TARGET_FRONT, run_dir)
        self._rids: list[ReqId] = []
        self._tokens: list[bytes] = []
        self._finished: list[FinishReason] = []
        self._done: list[Req] = []
        self._last_stats: EngineStats | None = None
        self._stats_at = 0.0

    def receive(self, timeout_s: float) -> list[Admit | Abort]:
        """All messages that are there; waits up to timeout_s for the first."""
        messages: list[Admit | Abort] = []
        if timeout_s > 0 and not self.inbox.socket.poll(int(timeout_s * 1000)):
            return messages
        while (msg := self.inbox.recv()) is not None:
            messages.append(msg)
        return messages

    def add(self, req: Req, tokens: list[int]) -> None:
        """New tokens of req; terminal if req.finish says so."""
        self._rids.append(req.rid)
        self._tokens.append(pack(tokens))
        self._finished.append(req.finish)
        if req.finish:
            self._done.append(req)

    def fail(self, rid: ReqId, kind: str, message: str) -> None:
        """End rid with an error."""
        self._outbox.send(encode(Failed(rid, kind, message)))

    def flush(self) -> None:
        """Send what add() collected."""
        if not self._rids:
            return
        usages = [req.usage() for req in self._done]
        self._outbox.send(encode(TokensOut(self._rids, self._tokens, self._finished, usages)))
        self._rids, self._tokens, self._finished, self._done = [], [], [], []

    def send_stats(self, stats: EngineStats, *, idle: bool) -> None:
        """Pass the counters on if they changed, at most four times a second or when the work is done."""
        now = time.monotonic()
        if stats == self._last_stats or (now < self._stats_at and not idle):
            return
        try:
            self._stats_out.send(encode(stats), zmq.NOBLOCK)
        except zmq.Again:
            return  # no front is there to read them
        self._last_stats, self._stats_at = stats, now + STATS_INTERVAL_S
