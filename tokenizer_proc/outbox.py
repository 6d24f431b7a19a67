"""A PUSH socket that never blocks its loop."""

from collections import deque
from typing import Any

import zmq

from memsvc.wire.base import Msg
from memsvc.wire.codec import encode


class Outbox:
    """Keeps what the socket can't take now: the requests in flight bound it, and none of it may get lost."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self.socket = socket
        self._waiting: deque[bytes] = deque()

    @property
    def is_waiting(self) -> bool:
        """There is something to send as soon as the socket is writable."""
        return bool(self._waiting)

    def send(self, msg: Msg) -> None:
        """Now if possible, else later, in order."""
        self._waiting.append(encode(msg))
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes."""
        while self._waiting:
            try:
                self.socket.send(self._waiting[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._waiting.popleft()
