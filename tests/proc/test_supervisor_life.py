"""A real supervisor over tiny fake processes: start order, restarts, stops, and what is left behind (nothing)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
ALL = ("memsvc", "draft", "target", "tokenizer", "front")
WAIT_S = 20.0


class Launch:
    """A supervisor process and the events that its children wrote down."""

    def __init__(self, run_dir: Path, *args: str) -> None:
        self.run_dir = run_dir
        command = [sys.executable, "-m", "tests.support.fake_launch", str(run_dir), *args]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def expect_line(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line, self.errors()

    def events(self) -> list[str]:
        file = self.run_dir / "events"
        return file.read_text().splitlines() if file.exists() else []

    def pid(self, role: str) -> int:
        ready = [event for event in self.events() if event.startswith(f"{role} ready")]
        return int(ready[-1].split()[-1])

    def errors(self) -> str:
        assert self.process.stderr is not None
        self.process.kill()
        return self.process.stderr.read()

    def end(self) -> tuple[int, str]:
        _out, errors = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, errors


@contextmanager
def launched(run_dir: Path, *args: str) -> Iterator[Launch]:
    launch = Launch(run_dir, *args)
    try:
        yield launch
    finally:
        launch.process.kill()
        launch.process.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; the test's own timeout ends one that never does."""
    while not condition():
        time.sleep(0.01)


def index_of(events: list[str], start: str) -> int:
    return next(i for i, event in enumerate(events) if event.startswith(start))


def test_processes_start_in_order_and_stop_in_order_on_ctrl_c(tmp_path: Path) -> None:
    with launched(tmp_path, *ALL) as launch:
        launch.expect_line("all up first")
        started = launch.events()
        for later in ("draft", "target", "tokenizer", "front"):
            assert index_of(started, "memsvc ready") < index_of(started, f"{later} start")
        wait_for(lambda: len([e for e in launch.events() if "PeerUp" in e]) == 4)
        # As a terminal does it: to the whole process group.
        os.killpg(launch.process.pid, signal.SIGINT)
        status, _errors = launch.end()
        assert status == 0
        stopped = [event.split()[0] for event in launch.events() if event.endswith("stopped")]
        assert stopped == ["front", "tokenizer", "target", "draft", "memsvc"]


def test_sigterm_stops_as_ctrl_c_does_and_without_draft(tmp_path: Path) -> None:
    with launched(tmp_path, "memsvc", "target", "tokenizer", "front") as launch:
        launch.expect_line("all up first")
        launch.process.terminate()
        assert launch.end()[0] == 0
        assert not any(event.startswith("draft") for event in launch.events())


def test_a_deaf_process_is_killed_after_its_grace_time(tmp_path: Path) -> None:
    with launched(tmp_path, "memsvc", "target=deaf", "tokenizer", "front", "--grace", "0.2") as launch:
        launch.expect_line("all up first")
        target = psutil.Process(launch.pid("target"))
        launch.process.terminate()
        status, errors = launch.end()
        assert status == 0
        assert "kill role=target" in errors
        assert not target.is_running()


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, "memsvc", "target=deaf", "tokenizer", "front", "--grace", "600") as launch:
        launch.expect_line("all up first")
        launch.process.send_signal(signal.SIGINT)
        wait_for(lambda: "tokenizer stopped" in launch.events())
        launch.process.send_signal(signal.SIGINT)
        assert launch.end()[0] == 0


def test_each_process_that_dies_is_restarted_alone(tmp_path: Path) -> None:
    with launched(tmp_path, *ALL) as launch:
        launch.expect_line("all up first")
        for role in ("tokenizer", "target", "draft"):
            others = {other: launch.pid(other) for other in ALL if other != role}
            os.kill(launch.pid(role), signal.SIGKILL)
            launch.expect_line("all up again")
            assert {other: launch.pid(other) for other in others} == others
            wait_for(lambda role=role: f"front PeerUp {role} 2" in launch.events())
            told = [event for event in launch.events() if event.startswith("front Peer") and f" {role}" in event]
            assert told == [f"front PeerUp {role} 1", f"front PeerDown {role}", f"front PeerUp {role} 2"]
        before = len(launch.events())
        os.kill(launch.pid("front"), signal.SIGKILL)
        launch.expect_line("all up again")
        # A new front is told what serves.
        wait_for(lambda: len([event for event in launch.events()[before:] if "PeerUp" in event]) == 4)
        told = sorted(event for event in launch.events()[before:] if "Peer" in event)
        assert told == [f"front PeerUp {role}" for role in ("draft 2", "memsvc 1", "target 2", "tokenizer 2")]
        launch.process.terminate()
        assert launch.end()[0] == 0


def test_when_the_memory_service_dies_its_workers_restart_and_the_tokenizer_stays(tmp_path: Path) -> None:
    with launched(tmp_path, *ALL) as launch:
        launch.expect_line("all up first")
        kept = {role: launch.pid(role) for role in ("tokenizer", "front")}
        os.kill(launch.pid("memsvc"), signal.SIGKILL)
        launch.expect_line("all up again")
        events = launch.events()
        again = len(events) - 1 - index_of(events[::-1], "memsvc start")
        for role in ("target", "draft"):
            assert events.index(f"{role} stopped") < again
            assert [event for event in events if event.startswith(f"{role} start")] == [f"{role} start"] * 2
        assert {role: launch.pid(role) for role in kept} == kept
        wait_for(lambda: "front PeerUp target 2" in launch.events())
        told = [event for event in launch.events() if event.startswith("front PeerDown")]
        assert sorted(told) == [f"front PeerDown {role}" for role in ("draft", "memsvc", "target")]
        launch.process.terminate()
        assert launch.end()[0] == 0


def test_a_process_that_keeps_failing_stops_everything_with_one_line(tmp_path: Path) -> None:
    with launched(tmp_path, "memsvc", "target", "tokenizer=2:crash", "front") as launch:
        launch.expect_line("all up first")
        os.kill(launch.pid("tokenizer"), signal.SIGKILL)
        status, errors = launch.end()
        assert status == 1
        last = errors.splitlines()[-1]
        assert "CRITICAL" in last
        assert "tokenizer: ended with status 7, for the 3. time within 60 s" in last
        assert {"memsvc stopped", "target stopped", "front stopped"} <= set(launch.events())


def test_a_fatal_message_stops_everything_and_is_the_last_line(tmp_path: Path) -> None:
    with launched(tmp_path, "memsvc", "target=fatal", "tokenizer", "front") as launch:
        status, errors = launch.end()
        assert status == 1
        assert "target: the model has no layers" in errors.splitlines()[-1]


def test_a_process_that_fails_before_it_was_ever_ready_is_not_tried_again(tmp_path: Path) -> None:
    with launched(tmp_path, "memsvc", "target=crash", "tokenizer", "front") as launch:
        status, errors = launch.end()
        assert status == 1
        assert "target: ended with status 7 before it was ready" in errors.splitlines()[-1]
        assert launch.events().count("target start") == 1


def test_a_draft_that_keeps_failing_leaves_a_server_without_speculation(tmp_path: Path) -> None:
    with launched(tmp_path, "memsvc", "draft=2:crash", "target", "tokenizer", "front") as launch:
        launch.expect_line("all up first")
        os.kill(launch.pid("draft"), signal.SIGKILL)
        launch.expect_line("all up again")
        assert launch.events().count("draft start") == 3
        launch.process.terminate()
        status, errors = launch.end()
        assert status == 0
        assert errors.count("ERROR") == errors.count("serving without draft") == 1


def test_a_process_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    with launched(tmp_path, "memsvc=mute", "target", "tokenizer", "front", "--ready-limit", "0.5") as launch:
        status, errors = launch.end()
        assert status == 1
        assert "memsvc: not ready after 0.5 s" in errors.splitlines()[-1]


HANG = ("--look", "0.3", "--hang-timeout", "4.5")
"""Silent after three seconds, killed after four and a half."""


@pytest.mark.parametrize("role", ["target", "draft", "tokenizer", "front"])
def test_a_stopped_process_is_told_to_the_front_then_killed_and_replaced(tmp_path: Path, role: str) -> None:
    with launched(tmp_path, *ALL, *HANG) as launch:
        launch.expect_line("all up first")
        kept = {other: launch.pid(other) for other in ALL if other != role}
        os.kill(launch.pid(role), signal.SIGSTOP)
        launch.expect_line("all up again")
        assert {other: launch.pid(other) for other in kept} == kept
        if role != "front":
            wait_for(lambda: f"front PeerUp {role} 2" in launch.events())
            told = [event for event in launch.events() if event.startswith("front Peer") and f" {role}" in event]
            changes = ["PeerUp {} 1", "PeerSilent {}", "PeerDown {}", "PeerUp {} 2"]
            assert told == [f"front {change.format(role)}" for change in changes]
        launch.process.terminate()
        status, errors = launch.end()
        assert status == 0
        assert errors.count("ERROR") == errors.count(f"hangs role={role}") == 1


def test_a_stopped_memory_service_takes_its_workers_along_as_a_dead_one_does(tmp_path: Path) -> None:
    with launched(tmp_path, *ALL, *HANG) as launch:
        launch.expect_line("all up first")
        kept = {role: launch.pid(role) for role in ("tokenizer", "front")}
        # A worker that waits for the memory service is silent as well, and not to blame.
        os.kill(launch.pid("target"), signal.SIGSTOP)
        os.kill(launch.pid("memsvc"), signal.SIGSTOP)
        launch.expect_line("all up again")
        assert {role: launch.pid(role) for role in kept} == kept
        launch.process.terminate()
        status, errors = launch.end()
        assert status == 0
        assert "hangs role=memsvc" in errors
        assert "hangs role=target" not in errors


def test_a_process_whose_loop_is_stuck_hangs_though_it_runs(tmp_path: Path) -> None:
    with launched(tmp_path, "memsvc", "target=stuck:1", "tokenizer", "front", *HANG) as launch:
        launch.expect_line("all up first")
        launch.expect_line("all up again")
        assert launch.events().count("target start") == 2


def test_a_process_that_goes_on_after_a_while_is_left_alone(tmp_path: Path) -> None:
    with launched(tmp_path, *ALL, "--look", "0.3", "--hang-timeout", "600") as launch:
        launch.expect_line("all up first")
        pid = launch.pid("target")
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: "front PeerSilent target" in launch.events())
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: launch.events()[-1] == "front PeerUp target 1")
        assert launch.pid("target") == pid
        launch.process.terminate()
        assert launch.end()[0] == 0


def test_a_supervisor_that_was_stopped_itself_blames_nobody(tmp_path: Path) -> None:
    with launched(tmp_path, *ALL, "--look", "0.3", "--hang-timeout", "3") as launch:
        launch.expect_line("all up first")
        launch.process.send_signal(signal.SIGSTOP)
        # As long as any process would have been killed for; then it looks before it has read what waits.
        time.sleep(4)
        launch.process.send_signal(signal.SIGCONT)
        launch.process.terminate()
        status, errors = launch.end()
        assert status == 0
        assert "no sign of life" not in errors


def test_killing_the_supervisor_leaves_no_orphans(tmp_path: Path) -> None:
    with launched(tmp_path, *ALL) as launch:
        launch.expect_line("all up first")
        children = [psutil.Process(launch.pid(role)) for role in ALL]
        launch.process.kill()
        gone, alive = psutil.wait_procs(children, timeout=WAIT_S)
        assert (len(gone), alive) == (5, [])


def test_killing_the_supervisor_while_it_starts_leaves_no_orphans(tmp_path: Path) -> None:
    with launched(tmp_path, *ALL) as launch:
        supervisor = psutil.Process(launch.process.pid)
        wait_for(lambda: bool(supervisor.children()))
        children = supervisor.children()
        launch.process.kill()
        _gone, alive = psutil.wait_procs(children, timeout=WAIT_S)
        assert alive == []
