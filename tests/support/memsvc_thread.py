"""The service's loop in a thread of the test, around any manager."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from memsvc.__main__ import make_arena
from memsvc.process import StopFlag
from memsvc.server import Manager, serve


@dataclass
class ServerThread:
    """stop ends it; error is what serve raised."""

    thread: threading.Thread
    stop: StopFlag
    error: list[BaseException] = field(default_factory=list)

    def join(self) -> None:
        """Wait for the end of the loop."""
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()


@contextmanager
def serving(manager: Manager, run_dir: Path, arena_bytes: int = 1 << 20, device: str = "cpu") -> Iterator[ServerThread]:
    """Serve from run_dir until the block ends."""
    stop, ready = StopFlag(), threading.Event()
    arena = make_arena(device, arena_bytes)

    def run() -> None:
        try:
            serve(manager, arena, run_dir, stop, ready.set)
        except BaseException as error:
            server.error.append(error)

    server = ServerThread(threading.Thread(target=run), stop)
    server.thread.start()
    try:
        while not ready.wait(0.01):
            if server.error:
                raise server.error[0]
        yield server
    finally:
        stop.set()
        server.join()
        stop.close()
        arena.close()
