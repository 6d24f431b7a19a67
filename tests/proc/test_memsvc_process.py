"""Edges of a process: parent gone, SIGTERM, announcements, logs."""

import asyncio
import gc
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from memsvc.client import MemoryClient
from memsvc.heart import BEAT_S, Heart
from memsvc.process import StopFlag, announce, die_with_parent, install_sigterm, setup_logging
from memsvc.transport import bind
from memsvc.wire.codec import decoder
from memsvc.wire.control import Alive, Fatal, Ready
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


SERVING = """
import gc
import sys
from dataclasses import dataclass
from contextlib import contextmanager
from memsvc.errors import FencedError
from memsvc.process import Program

@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    run_dir: str
    log_level: str = "INFO"
    fault: str = ""

class Serving:
    def __init__(self, config): self.fault = config.fault
    def lines(self): return ["a line"] if self.fault != "lines" else [f"{gc.isenabled()} {gc.get_freeze_count() > 0}"]
    def num_device_bytes(self): return 0
    def meet(self, stop):
        import select
        if self.fault == "lonely": print("alone", flush=True); select.select([stop.fd], [], [])
    def run(self, stop, beat):
        if self.fault == "bug": {}["what a user wrote"]
        if self.fault == "fenced": raise FencedError("epoch 3 is over")
        import select
        while not stop.is_set:
            beat()
            select.select([stop.fd], [], [], 0.1)

@contextmanager
def make(config):
    if config.fault == "unfit": raise ValueError("no weights")
    if config.fault == "made": raise ValueError(f"collects={gc.isenabled()}")
    yield Serving(config)
    print("closed", flush=True)

sys.exit(Program(package="x", role="target", config_type=Config).main(make))
"""


@contextmanager
def program(run_dir: Path, fault: str = "") -> Iterator[tuple[subprocess.Popen[str], zmq.Socket[bytes]]]:
    config = run_dir / "x.json"
    config.write_text(f'{{"run_dir": "{run_dir}", "fault": "{fault}"}}')
    command = [sys.executable, "-c", SERVING, "--config", str(config)]
    with zmq.Context() as context, bind(context, ALL_LAUNCH, run_dir) as socket:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            yield process, socket
        finally:
            process.kill()
            process.communicate()


def said(socket: zmq.Socket[bytes]) -> Ready | Fatal | Alive:
    return decoder(ALL_LAUNCH.there).decode(socket.recv())


def test_a_program_says_ready_then_gives_signs_of_life_until_sigterm(tmp_path: Path):
    with program(tmp_path) as (process, socket):
        assert said(socket) == Ready("target", process.pid, ["a line"])
        first = time.monotonic()
        assert [said(socket) for _ in range(2)] == [Alive("target", process.pid)] * 2
        assert time.monotonic() - first >= BEAT_S / 2, "signs of life at every turn of a fast loop"
        process.terminate()
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "closed\n")
        assert err.splitlines()[-1].endswith("target INFO stopped")


def test_a_program_says_nothing_before_it_has_met_its_peer(tmp_path: Path):
    with program(tmp_path, "lonely") as (process, socket):
        assert process.stdout is not None
        assert process.stdout.readline() == "alone\n"
        assert not socket.poll(0)
        process.terminate()
        out, _ = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "closed\n")
        assert not socket.poll(0)


def test_a_program_that_cannot_be_made_is_fatal(tmp_path: Path):
    with program(tmp_path, "unfit") as (process, socket):
        assert said(socket) == Fatal("target", process.pid, "no weights")
        assert process.wait(20) == 1


def test_garbage_is_looked_for_only_when_a_program_serves_and_not_in_what_it_loaded(tmp_path: Path):
    with program(tmp_path, "made") as (process, socket):
        assert said(socket) == Fatal("target", process.pid, "collects=False")
    with program(tmp_path, "lines") as (process, socket):
        assert said(socket) == Ready("target", process.pid, ["True True"])


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("fenced", "ERROR the memory service gave this client up: epoch 3 is over"),
        ("bug", "CRITICAL bug: KeyError at process.py:"),
    ],
)
def test_a_program_that_fails_later_may_start_again_and_logs_nothing_of_a_user(tmp_path: Path, fault: str, line: str):
    with program(tmp_path, fault) as (process, socket):
        assert isinstance(said(socket), Ready)
        _out, err = process.communicate(timeout=20)
        assert process.returncode == 1
        assert line in err.splitlines()[-1]
        assert "what a user wrote" not in err
        assert not socket.poll(0)


def test_what_cannot_connect_leaves_no_socket_behind(tmp_path: Path):
    too_long = tmp_path / ("x" * 120)
    for make in (lambda: MemoryClient(too_long), lambda: Heart(too_long, "target")):
        with pytest.raises(ValueError, match="bytes, the system allows"):
            make()
    # An unclosed socket or context is a ResourceWarning when it is collected, and that is an error here.
    gc.collect()
