"""Receiving sides that outlive garbage: a typed message comes out, or the frame is counted."""

import logging
import time
from typing import Any

import msgspec
import zmq

from memsvc.wire.base import BadRequest, Msg
from memsvc.wire.codec import decoder, encode
from memsvc.wire.links import Link

logger = logging.getLogger(__name__)

SEQ_BYTES = 8
"""Length of the number in front of every request and reply of a DEALER/ROUTER link."""

_LOG_EVERY_S = 10.0


class BadFrames:
    """Counts frames of one link that are not messages; logs the first and then one every ten seconds."""

    def __init__(self, link: Link) -> None:
        self.num = 0
        self._name = link.name
        self._log_after = 0.0

    def count(self, reason: str) -> None:
        """One more; reason says what was wrong with it."""
        self.num += 1
        now = time.monotonic()
        if now >= self._log_after:
            self._log_after = now + _LOG_EVERY_S
            logger.warning("bad frame link=%s total=%d reason=%s", self._name, self.num, reason)


def recv_rest(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The frames of a message that are left after the first ones were received."""
    frames = []
    while socket.getsockopt(zmq.RCVMORE):
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames


class PullInbox:
    """Messages of a PUSH/PULL link on its PULL side."""

    def __init__(self, socket: zmq.Socket[bytes], link: Link) -> None:
        self.socket = socket
        self.bad_frames = BadFrames(link)
        self._decode = decoder(link.there).decode

    def recv(self) -> Any:
        """The next message of the link's union, or None if none has arrived. Never blocks."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            msg = self.decode(frames)
            if msg is not None:
                return msg

    def decode(self, frames: list[bytes]) -> Any:
        """The message in frames that the caller received itself, or None if they hold none."""
        if len(frames) != 1:
            self.bad_frames.count(f"{len(frames)} frames instead of 1")
            return None
        try:
            return self._decode(frames[0])
        except msgspec.DecodeError as error:
            self.bad_frames.count(str(error))
            return None


class RouterInbox:
    """Requests of a DEALER/ROUTER link on its ROUTER side, and the way back to who sent them.

    A frame without a seq is dropped; one with a seq that holds no request is answered BadRequest.
    """

    def __init__(self, socket: zmq.Socket[bytes], link: Link) -> None:
        self.socket = socket
        self.bad_frames = BadFrames(link)
        self._decode = decoder(link.there).decode

    def recv(self) -> tuple[list[bytes], Any] | None:
        """(return address, message) of the next request, or None if none has arrived. Never blocks."""
        recv = self.socket.recv
        while True:
            # Frame by frame: recv_multipart costs a third more of a small service's time.
            try:
                address = [recv(zmq.NOBLOCK)]
            except zmq.Again:
                return None
            address.append(recv(zmq.NOBLOCK))
            frames = recv_rest(self.socket)
            if len(frames) != 1 or len(address[1]) != SEQ_BYTES:
                sizes = [len(frame) for frame in (address[1], *frames[:3])]
                self.bad_frames.count(f"frames of {sizes} bytes are not [seq, body]")
                continue
            try:
                return address, self._decode(frames[0])
            except msgspec.DecodeError as error:
                self.bad_frames.count(str(error))
                self.reply(address, BadRequest(f"undecodable request: {error}"))

    def reply(self, address: list[bytes], msg: Msg) -> None:
        """Answer a request. A peer that is gone, or reads nothing, loses the answer; the loop goes on."""
        send, more = self.socket.send, zmq.NOBLOCK | zmq.SNDMORE
        body = encode(msg)
        try:
            for frame in address:
                send(frame, more)
            send(body, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
