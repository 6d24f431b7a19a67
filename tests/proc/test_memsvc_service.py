"""`python -m memsvc` as a process: start, stop, clients that die, what an operator sees."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from memsvc.client import AdminClient, MemoryClient
from memsvc.errors import FencedError, MemoryServiceError
from memsvc.registration import StepParts
from memsvc.transport import bind
from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.codec import decoder
from memsvc.wire.control import Alive, Fatal, Ready
from memsvc.wire.links import ALL_LAUNCH
from memsvc.wire.mem import Close, Commit, Opened, OpenReq, Reserve, Step
from tests.support.memsvc_process import ROOT, SMALL_POOL, memory_service, start_service

KINDS = ["target_kv", "draft_kv"]

CLIENT = """
import sys
from pathlib import Path
from memsvc.client import MemoryClient
from memsvc.registration import StepParts
from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.mem import OpenReq, Reserve
with MemoryClient(Path(sys.argv[1])) as client:
    client.register(sys.argv[2], "target", ["target_kv", "draft_kv"], "m")
    client.step(StepParts(opens=[OpenReq(ReqId(1), pack_tokens(list(range(9))), 4)]))
    client.step(StepParts(reserve=Reserve([ReqId(1)], [9])))
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    with memory_service(tmp_path):
        yield tmp_path


def start_client(run_dir: Path, engine: str) -> subprocess.Popen[bytes]:
    """A process that holds one open request until its input ends."""
    command = [sys.executable, "-c", CLIENT, str(run_dir), engine]
    client = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == b"open\n"
    return client


def wait_until_no_client(admin: AdminClient) -> None:
    """The death is seen at once, but not before it happened; asking lets the service run."""
    while (stats := admin.get_stats()).num_clients or any(kind.num_quarantine for kind in stats.kinds):
        pass


def serve_once(client: MemoryClient, rid: ReqId, tokens: list[int]) -> int:
    """Open, compute all, close; returns the hit length."""
    (opened,) = client.step(StepParts(opens=[OpenReq(rid, pack_tokens(tokens), 4)])).opened
    assert isinstance(opened, Opened), opened
    num = len(tokens) - opened.prefix_len
    stepped = client.step(StepParts(reserve=Reserve([rid], [num])))
    assert stepped.no_room is None
    commit = Commit([rid], [len(tokens)], [len(tokens)], [b""])
    client.step(StepParts(done_step=stepped.num, commit=commit, closes=[Close([rid])]))
    return opened.prefix_len


def test_it_prints_its_plan_and_stops_on_sigterm_without_leaving_sockets(tmp_path: Path):
    service = subprocess.Popen(
        [sys.executable, "-m", "memsvc", "--run-dir", str(tmp_path / "run"), *SMALL_POOL],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert service.stdout is not None
    lines = list(iter(service.stdout.readline, f"ready: run_dir={tmp_path / 'run'} pid={service.pid}\n"))
    plan = "".join(lines)
    assert "target_kv" in plan
    assert "draft_kv" in plan
    assert sorted(path.name for path in (tmp_path / "run").glob("*.sock")) == [
        "arena.sock",
        "mem-admin.sock",
        "mem.sock",
    ]
    service.send_signal(signal.SIGTERM)
    _, errors = service.communicate(timeout=20)
    assert service.returncode == 0
    assert re.fullmatch(r"\S+Z memsvc INFO stopped\n", errors)
    assert list((tmp_path / "run").glob("*.sock")) == []


def next_said(socket: zmq.Socket[bytes]) -> Ready | Fatal | Alive:
    assert socket.poll(20_000)
    return decoder(ALL_LAUNCH.there).decode(socket.recv())


def test_a_supervised_service_announces_itself_and_ends_with_its_parent(tmp_path: Path):
    command = [sys.executable, "-m", "memsvc", "--run-dir", str(tmp_path), "--supervised", *SMALL_POOL]
    code = f"import subprocess; subprocess.run({command!r})"
    with zmq.Context() as context, bind(context, ALL_LAUNCH, tmp_path) as socket:
        parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        pidfd = -1
        try:
            # Alive comes over a socket of its own.
            while not isinstance(ready := next_said(socket), Ready):
                assert isinstance(ready, Alive), ready
            pidfd = os.pidfd_open(ready.pid)
            assert ready.role == "memsvc"
            assert any("target_kv" in line for line in ready.lines)
            parent.kill()
            assert select.select([pidfd], [], [], 20)[0]
        finally:
            # The service ends with its parent; where that is what fails, it is ended by hand.
            parent.kill()
            parent.wait()
            if pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--arena-bytes", "8192T", "--kind", "target_kv:1M:16"], r"needs \d+ bytes, \d+ bytes of memory"),
        (["--arena-bytes", "1K", "--kind", "target_kv:1M:16"], "1048576"),
        (["--arena-bytes", "64M", "--kind", "state:1M:0:0:1"], "no token kind"),
        (["--arena-bytes", "64M"], "needed without --config: --kind"),
    ],
)
def test_a_service_that_cannot_start_says_why_with_numbers(tmp_path: Path, flags: list[str], complaint: str):
    command = [sys.executable, "-m", "memsvc", "--run-dir", str(tmp_path), *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode in (1, 2)
    assert re.search(complaint, ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_supervisor_hears_why_it_cannot_start(tmp_path: Path):
    flags = ["--supervised", "--arena-bytes", "8192T", "--kind", "target_kv:1M:16"]
    with zmq.Context() as context, bind(context, ALL_LAUNCH, tmp_path) as socket:
        subprocess.run([sys.executable, "-m", "memsvc", "--run-dir", str(tmp_path), *flags], cwd=ROOT, timeout=60)
        fatal = decoder(ALL_LAUNCH.there).decode(socket.recv(zmq.NOBLOCK))
    assert isinstance(fatal, Fatal)
    assert "bytes of memory are available" in fatal.message


def test_a_second_request_finds_what_the_first_one_published(run_dir: Path):
    with MemoryClient(run_dir) as client:
        client.register("e", "target", KINDS, "m")
        tokens = list(range(21))
        assert serve_once(client, ReqId(1), tokens) == 0
        assert serve_once(client, ReqId(2), tokens) == 20
        assert serve_once(client, ReqId(3), [*tokens[:10], 99, 98, 97]) == 8


def test_a_repeated_number_gets_the_same_reply_and_a_gap_is_refused(run_dir: Path):
    with MemoryClient(run_dir) as client:
        epoch = client.register("e", "target", KINDS, "m").epoch
        step = Step(epoch, 1, 0, opens=[OpenReq(ReqId(1), pack_tokens([1, 2, 3]), 4)])
        first = client._rpc.call(step, 20)
        assert client._rpc.call(step, 20) == first
        reserve = Step(epoch, 2, 0, reserve=Reserve([ReqId(1)], [3]))
        granted = client._rpc.call(reserve, 20)
        assert granted.grow_pages
        assert client._rpc.call(reserve, 20) == granted
        assert client._rpc.call(step, 20) == first
        client._registration.last_num = 3
        with pytest.raises(MemoryServiceError, match="4"):
            client.step(StepParts())
        client._registration.last_num = 2
        assert client.step(StepParts()).num == 3


def test_a_refused_step_changes_nothing_and_uses_no_number(run_dir: Path):
    with MemoryClient(run_dir) as client, AdminClient(run_dir) as admin:
        client.register("e", "target", KINDS, "m")
        client.step(StepParts(opens=[OpenReq(ReqId(1), pack_tokens([1, 2, 3]), 4)]))
        before = admin.get_stats().kinds
        bad = StepParts(closes=[Close([ReqId(1)])], reserve=Reserve([ReqId(99)], [1]))
        with pytest.raises(MemoryServiceError, match="99"):
            client.step(bad)
        assert admin.get_stats().kinds == before
        assert client.step(StepParts(reserve=Reserve([ReqId(1)], [3]))).num == 2


def test_a_killed_clients_requests_are_freed_and_the_tree_stays(run_dir: Path):
    with AdminClient(run_dir) as admin:
        with MemoryClient(run_dir) as client:
            client.register("e", "target", KINDS, "m")
            serve_once(client, ReqId(1), list(range(9)))
        tree = [kind.num_tree for kind in admin.get_stats().kinds]
        assert all(tree)
        child = start_client(run_dir, "e")
        assert admin.get_stats().num_reqs == 1
        child.kill()
        child.communicate(timeout=20)
        wait_until_no_client(admin)
        stats = admin.get_stats()
        assert (stats.num_reqs, stats.num_clients) == (0, 0)
        assert [kind.num_tree for kind in stats.kinds] == tree
        assert all(kind.num_private == kind.num_limbo == 0 for kind in stats.kinds)
        assert admin.check().problems == []
        with MemoryClient(run_dir) as client:
            client.register("e", "target", KINDS, "m")
            assert serve_once(client, ReqId(2), list(range(9))) == 8


def test_registering_again_fences_the_first(run_dir: Path):
    with MemoryClient(run_dir) as first, MemoryClient(run_dir) as second:
        first.register("e", "target", KINDS, "m")
        first.step(StepParts(opens=[OpenReq(ReqId(1), pack_tokens([1, 2, 3]), 4)]))
        second.register("e", "target", KINDS, "m")
        with pytest.raises(FencedError):
            first.step(StepParts())
        second.step(StepParts(opens=[OpenReq(ReqId(1), pack_tokens([1, 2, 3]), 4)]))


@pytest.mark.slow
def test_two_hundred_registrations_and_deaths_leave_no_descriptor(tmp_path: Path):
    # Forked, not started anew: what is under test is the service.
    code = """
import os, signal, sys
from pathlib import Path
from memsvc.client import MemoryClient
for number in range(200):
    child = os.fork()
    if child == 0:
        client = MemoryClient(Path(sys.argv[1]))
        client.register(f"e{number % 3}", "target", ["target_kv"], "m")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
"""
    with memory_service(tmp_path) as service, AdminClient(tmp_path) as admin:
        admin.get_stats()
        before = os.listdir(f"/proc/{service.pid}/fd")
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, timeout=120)
        wait_until_no_client(admin)
        # One connection more or less may be closing while it is counted.
        while abs(len(os.listdir(f"/proc/{service.pid}/fd")) - len(before)) > 1:
            admin.get_stats()
        assert admin.check().problems == []


def test_a_killed_service_leaves_a_directory_that_the_next_one_can_use(tmp_path: Path):
    first = start_service(tmp_path)
    first.kill()
    first.communicate(timeout=20)
    assert (tmp_path / "mem.sock").exists()
    with memory_service(tmp_path), MemoryClient(tmp_path) as client:
        client.register("e", "target", KINDS, "m")
        assert serve_once(client, ReqId(1), list(range(9))) == 0


def test_the_admin_commands_print_tables_and_json(run_dir: Path):
    child = start_client(run_dir, "e")

    def ask(*arguments: str) -> str:
        command = [sys.executable, "-m", "memsvc", *arguments, "--run-dir", str(run_dir)]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout

    stats = json.loads(ask("stats", "--json"))
    assert [kind["name"] for kind in stats["kinds"]] == KINDS
    assert stats["num_reqs"] == 1
    assert "target_kv" in ask("stats")
    (req,) = json.loads(ask("snapshot", "--json"))["reqs"]
    assert (req["rid"], req["engine"], req["committed_len"]) == (1, "e", 0)
    assert json.loads(ask("check", "--json"))["problems"] == []
    child.communicate(b"", timeout=20)


@pytest.mark.parametrize(("place", "sentence"), [(".", "no memory service runs in "), ("nowhere", "run directory ")])
def test_asking_where_nobody_serves_fails_with_a_sentence(tmp_path: Path, place: str, sentence: str):
    command = [sys.executable, "-m", "memsvc", "stats", "--run-dir", str(tmp_path / place)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"python -m memsvc stats: {sentence}")


def test_a_mistyped_command_is_told_the_ones_there_are():
    ended = subprocess.run(
        [sys.executable, "-m", "memsvc", "stat"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "serve, stats, check, snapshot" in ended.stderr


def test_the_example_runs_and_its_second_request_hits(tmp_path: Path):
    command = [sys.executable, str(ROOT / "docs" / "examples" / "own_engine.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "first request: cached 0\n" in ended.stdout
    assert "WARNING" not in ended.stderr
    assert "second request: cached 96\n" in ended.stdout
    assert re.search(r"leaked_bytes +0\n", ended.stdout)
    assert len((ROOT / "docs" / "examples" / "own_engine.py").read_text().splitlines()) <= 80
