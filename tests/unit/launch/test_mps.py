"""The MPS daemon of a run, with a script in its place: started before the workers, and gone at the end."""

import os
import signal
from pathlib import Path

import pytest

from launch import mps
from launch.__main__ import mps_line
from launch.mps import MpsDaemon

SCRIPT = """#!/bin/sh
dir=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -f ]; then
    echo starting > $CUDA_MPS_LOG_DIRECTORY/control.log
    FAULT
    mkfifo $dir/control && echo $$ > $dir/pid
    read word < $dir/control
    rm $dir/control $dir/pid
    exit 0
fi
read command
[ -e $dir/pid ] || exit 1
[ $command != quit ] || [ -n "KEEP" ] || echo > $dir/control
"""


def script(folder: Path, fault: str = "", keep: str = "") -> str:
    """A program in the daemon's place. fault: done before it listens. keep: it takes no quit."""
    file = folder / "control"
    file.write_text(SCRIPT.replace("FAULT", fault).replace("KEEP", keep))
    file.chmod(0o700)
    return str(file)


def pid_of(daemon: MpsDaemon) -> int:
    return int((Path(daemon.env["CUDA_MPS_PIPE_DIRECTORY"]) / "pid").read_text())


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_listens_below_the_run_directory_and_ends_with_the_block(tmp_path: Path):
    with MpsDaemon(tmp_path, script(tmp_path)) as daemon:
        assert {Path(path).parent for path in daemon.env.values()} == {tmp_path}
        first = pid_of(daemon)
        assert not is_gone(first)
        daemon.restart()
        second = pid_of(daemon)
        assert is_gone(first)
        assert second != first
    assert is_gone(second)
    daemon.stop()


def test_one_that_takes_no_quit_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mps, "STOP_S", 0.05)
    with MpsDaemon(tmp_path, script(tmp_path, keep="yes")) as daemon:
        pid = pid_of(daemon)
    assert is_gone(pid)


def test_one_that_does_not_come_up_is_named_with_its_last_words(tmp_path: Path):
    with pytest.raises(ValueError, match="does not come up; its log ends: starting"):
        MpsDaemon(tmp_path, script(tmp_path, fault="exit 1")).start()
    with pytest.raises(ValueError, match="nowhere/control cannot be started"):
        MpsDaemon(tmp_path, "nowhere/control").start()


def test_one_that_was_killed_is_started_again(tmp_path: Path):
    with MpsDaemon(tmp_path, script(tmp_path)) as daemon:
        pid = pid_of(daemon)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        daemon.restart()
        assert pid_of(daemon) != pid


def test_the_line_says_what_was_chosen_and_what_it_costs():
    assert mps_line(is_on=True).startswith("mps=on: ")
    assert "cold" in mps_line(is_on=True)
    assert mps_line(is_on=False).startswith("mps=off: ")
