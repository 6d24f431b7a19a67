"""A whole server of target and drafter in processes of its own, for as long as a `with` block runs."""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import IO

_SHOWN_LINES = 30
_STOP_S = 30.0


@contextmanager
def served(flags: Sequence[str]) -> Iterator[str]:
    """The URL of `python -m launch` with these flags and a free port. Raises RuntimeError with its last lines if it ends.

    The server is stopped at the end of the block, as by Ctrl-C.
    """
    command = [sys.executable, "-m", "launch", "--port", "0", *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    reader = None
    try:
        url = _wait_for_url(process.stdout)
        # The pipe has to be read on, or the server would stand still once it is full.
        reader = Thread(target=deque, args=(process.stdout, 0), daemon=True)
        reader.start()
        yield url
    finally:
        _stop(process)
        if reader is not None:
            reader.join()
        process.stdout.close()


def _wait_for_url(lines: IO[str]) -> str:
    last: deque[str] = deque(maxlen=_SHOWN_LINES)
    for line in lines:
        last.append(line)
        words = line.split()
        if words[:1] == ["ready"]:
            return words[1]
    raise RuntimeError("the server ended before it was ready:\n" + "".join(last))


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        # It leads a session of its own, so this is the server and all its processes.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
