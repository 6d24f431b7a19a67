"""Signs of life: each process tells the supervisor about once a second that its loop goes round."""

import contextlib
import os
import time
from pathlib import Path
from typing import Self

import zmq

from memsvc.transport import connect
from memsvc.wire.codec import encode
from memsvc.wire.control import Alive
from memsvc.wire.links import ALL_LAUNCH

BEAT_S = 1.0
"""Least time between two signs of life, and the longest a loop may sleep. launch/silence.py has what follows without."""


class Heart:
    """Call `beat` from the loop that does the work, never from a thread: a thread would hide that the loop is stuck."""

    def __init__(self, run_dir: Path, role: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = connect(self._context, ALL_LAUNCH, run_dir)
        except BaseException:
            self._context.term()
            raise
        self._frame = encode(Alive(role, os.getpid()))
        self._next = 0.0

    def beat(self) -> None:
        """Say that work goes on, unless it was said less than BEAT_S ago. Never blocks, and costs a look at the clock."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + BEAT_S
        # A supervisor that reads nothing, or is not there, is no reason to stop working.
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._frame, zmq.NOBLOCK)

    def close(self) -> None:
        """No sign of life after this."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()
