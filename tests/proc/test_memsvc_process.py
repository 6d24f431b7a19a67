"""Edges of a process: parent gone, SIGTERM, announcements, logs."""

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from memsvc.process import StopFlag, announce, die_with_parent, install_sigterm, setup_logging
from memsvc.transport import bind
from memsvc.wire.codec import decoder
from memsvc.wire.control import Fatal, Ready
from memsvc.wire.links import ALL_LAUNCH

CHILD = """
import os, select
from memsvc.process import StopFlag, die_with_parent, install_sigterm
stop = StopFlag()
install_sigterm(stop.set)
die_with_parent()
print(os.getpid(), flush=True)
select.select([stop.fd], [], [])
print("stopped", flush=True)
"""


def test_a_child_is_told_when_its_parent_is_killed():
    parent_code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(child_pid)
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.stdout.readline() == "stopped\n"
        assert select.select([pidfd], [], [], 20)[0]
        os.close(pidfd)


def test_a_child_whose_parent_is_gone_already_exits():
    with pytest.raises(SystemExit):
        die_with_parent(parent_pid=2**22)


def test_sigterm_wakes_a_blocking_wait():
    old = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stop = StopFlag()
    try:
        install_sigterm(stop.set)
        assert not select.select([stop.fd], [], [], 0)[0]
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([stop.fd], [], [], 20)[0]
        assert stop.is_set
        # The interpreter's own signal code writes to the flag's descriptor, before any handler runs.
        wake_fd = signal.set_wakeup_fd(-1)
        assert os.path.sameopenfile(wake_fd, stop.fd)
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), old, strict=True):
            signal.signal(number, handler)
        stop.close()


def test_sigterm_runs_the_callback_in_a_running_loop():
    async def main() -> bool:
        stop = asyncio.Event()
        install_sigterm(stop.set)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            return await stop.wait()

    assert asyncio.run(main())


@pytest.mark.parametrize("msg", [Ready("memsvc", 7, ["a line"]), Fatal("target", 8, "no weights")])
def test_an_announcement_reaches_the_supervisor(tmp_path: Path, msg: Ready | Fatal):
    with zmq.Context() as context, bind(context, ALL_LAUNCH, tmp_path) as socket:
        announce(tmp_path, msg)
        assert decoder(ALL_LAUNCH.there).decode(socket.recv()) == msg


def test_logs_have_time_role_level_and_message(capsys: pytest.CaptureFixture[str]):
    root = logging.getLogger()
    old = root.handlers[:], root.level
    try:
        setup_logging("memsvc", "info")
        logging.getLogger("a.b").info("evict pages=%d", 3)
        logging.getLogger("a.b").debug("hidden")
    finally:
        root.handlers[:], root.level = old
    time, role, level, *message = capsys.readouterr().err.split()
    assert (len(time), role, level, message) == (24, "memsvc", "INFO", ["evict", "pages=3"])
