"""The requesting side of a DEALER/ROUTER link: one request, its one reply, and nothing stale."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from memsvc.inbox import recv_rest
from memsvc.transport import connect
from memsvc.wire.base import Msg
from memsvc.wire.codec import decoder, encode
from memsvc.wire.links import MAX_MSG_BYTES, Link


def _frames(seq: int, msg: Msg) -> list[bytes]:
    body = encode(msg)
    # The receiver would answer a longer one by cutting the connection.
    if len(body) > MAX_MSG_BYTES:
        raise ValueError(f"{type(msg).__name__} of {len(body)} bytes, a message may have {MAX_MSG_BYTES}")
    return [seq.to_bytes(8, "little"), body]


class Rpc:
    """Blocking client. One request is outstanding at a time; sending gives up on the one before.

    `send` and `recv` are the halves of `call`, for a caller with work to do in between. Not for use
    by two threads at once.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], link: Link, run_dir: Path) -> None:
        self.socket = connect(context, link, run_dir)
        self.num_dropped = 0
        """Replies that came too late for their request, or belong to none."""
        self._decode = decoder(link.back).decode
        self._numbers = itertools.count(1)
        self._seq = b""
        self._timeout_ms = -1

    def call(self, msg: Msg, timeout_s: float) -> Any:
        """The reply to msg. Raises TimeoutError after timeout_s, ValueError if msg is too long."""
        self.send(msg)
        return self.recv(timeout_s)

    def send(self, msg: Msg) -> None:
        """Send without waiting. Raises ValueError if msg is too long, TimeoutError if the queue is full."""
        frames = _frames(next(self._numbers), msg)
        try:
            # Frame by frame, as in recv: the multipart calls of pyzmq cost more than a small message does.
            self.socket.send(frames[0], zmq.NOBLOCK | zmq.SNDMORE)
            self.socket.send(frames[1], zmq.NOBLOCK)
        except zmq.Again:
            raise TimeoutError(f"{type(msg).__name__} not sent, the queue to the service is full") from None
        self._seq = frames[0]

    def recv(self, timeout_s: float) -> Any:
        """The reply to the last send. Raises TimeoutError after timeout_s; then recv may be called again."""
        deadline = time.monotonic() + timeout_s
        left_s = timeout_s
        while True:
            self._set_timeout(max(0, round(left_s * 1000)))
            try:
                seq = self.socket.recv()
            except zmq.Again:
                raise TimeoutError(f"no reply within {timeout_s:g} s") from None
            frames = recv_rest(self.socket)
            if len(frames) == 1 and seq == self._seq:
                self._seq = b""
                return self._decode(frames[0])
            self.num_dropped += 1
            left_s = deadline - time.monotonic()

    def _set_timeout(self, timeout_ms: int) -> None:
        # The socket's own timeout costs less than a poll, and it seldom changes.
        if timeout_ms != self._timeout_ms:
            self.socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
            self._timeout_ms = timeout_ms

    def close(self) -> None:
        """Close the socket; what was not sent yet is dropped."""
        self.socket.close()


class AsyncRpc:
    """The same for asyncio. Calls of several tasks wait for each other."""

    def __init__(self, context: zmq.asyncio.Context, link: Link, run_dir: Path) -> None:
        self.socket = connect(context, link, run_dir)
        self.num_dropped = 0
        self._decode = decoder(link.back).decode
        self._numbers = itertools.count(1)
        self._lock = asyncio.Lock()

    async def call(self, msg: Msg, timeout_s: float) -> Any:
        """The reply to msg. Raises TimeoutError after timeout_s, ValueError if msg is too long."""
        # Waiting for the calls of others counts as well.
        async with asyncio.timeout(timeout_s), self._lock:
            frames = _frames(next(self._numbers), msg)
            await self.socket.send_multipart(frames)
            while True:
                reply = await self.socket.recv_multipart()
                if len(reply) == 2 and reply[0] == frames[0]:
                    return self._decode(reply[1])
                self.num_dropped += 1

    def close(self) -> None:
        """Close the socket; what was not sent yet is dropped."""
        self.socket.close()
