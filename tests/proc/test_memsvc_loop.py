"""The service's loop over ipc, around a fake manager: lost replies, garbage, dying clients, bugs."""

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from memsvc.arena_client import fetch_arena
from memsvc.client import AdminClient, MemoryClient
from memsvc.errors import FencedError, MemoryServiceError, ServiceDown
from memsvc.registration import StepParts
from memsvc.server import ManagerBug
from memsvc.transport import connect
from memsvc.wire.base import WIRE_VERSION, BadRequest, ReqId, pack_tokens
from memsvc.wire.codec import decoder, encode
from memsvc.wire.links import MAX_MSG_BYTES, MEM, MEM_ADMIN, Link
from memsvc.wire.mem import Fenced, OpenReq, Register, Registered, Renew, Reserve, Step, Stepped
from tests.support.fake_manager import FakeManager, StallingManager
from tests.support.memsvc_thread import serving


@pytest.fixture
def manager(tmp_path: Path) -> FakeManager:
    return FakeManager(str(tmp_path / "arena.sock"))


@pytest.fixture
def run_dir(manager: FakeManager, tmp_path: Path) -> Iterator[Path]:
    with serving(manager, tmp_path):
        yield tmp_path


def join(client: MemoryClient, engine: str = "e", role: str = "target") -> Registered:
    return client.register(engine, role, ["target_kv"], "fingerprint")


class RawClient:
    """A DEALER that sends whatever frames it is told to."""

    def __init__(self, run_dir: Path, link: Link) -> None:
        self.context = zmq.Context()
        self.socket = connect(self.context, link, run_dir)
        self.link = link

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.socket.close()
        self.context.term()

    def call(self, frames: list[bytes]) -> tuple[bytes, object]:
        self.socket.send_multipart(frames)
        assert self.socket.poll(10_000), "no reply"
        seq, body = self.socket.recv_multipart()
        return seq, decoder(self.link.back).decode(body)


def test_a_step_gets_its_grants(run_dir: Path):
    with MemoryClient(run_dir) as client:
        join(client)
        stepped = client.step(StepParts(reserve=Reserve([ReqId(7), ReqId(8)], [16, 16])))
        assert (stepped.num, stepped.grow_rids, stepped.grow_pages) == (1, [7, 8], [1, 2])
        assert client.step(StepParts(done_step=1)).num == 2


def test_the_arena_comes_with_the_registration(run_dir: Path):
    with MemoryClient(run_dir) as client:
        registered = join(client)
        fd, num_bytes, _device = fetch_arena(registered.fd_endpoint)
        assert (num_bytes, os.fstat(fd).st_size) == (registered.layout.arena_bytes,) * 2
        os.close(fd)


def test_a_repeated_number_gets_the_same_reply_and_a_gap_is_refused(run_dir: Path, manager: FakeManager):
    with MemoryClient(run_dir) as client, RawClient(run_dir, MEM) as raw:
        epoch = join(client).epoch
        step = encode(Step(epoch, 1, 0, reserve=Reserve([ReqId(7)], [16])))
        first = raw.call([b"seq00001", step])
        assert raw.call([b"seq00002", step]) == (b"seq00002", first[1])
        assert raw.call([b"seq00003", encode(Step(epoch, 3, 0))])[1] == BadRequest("Step 3 after 1")


def test_a_step_is_sent_again_until_its_reply_comes(tmp_path: Path):
    manager = StallingManager()
    with serving(manager, tmp_path), MemoryClient(tmp_path, timeout_s=0.05) as client:
        join(client)
        client.begin_step(StepParts(reserve=Reserve([ReqId(7)], [16])))
        send = client._rpc.send
        client._rpc.send = lambda msg: (send(msg), manager.wake.release())
        stepped = client.finish_step()
        client._rpc.send = send
        assert (stepped.num, stepped.grow_pages) == (1, [1])
        # The late reply to the first send is not taken for the next one's.
        stepped = client.step(StepParts(reserve=Reserve([ReqId(7)], [16])))
        assert (stepped.num, stepped.grow_pages) == (2, [2])
        assert client._rpc.num_dropped >= 1


def test_without_any_reply_the_service_is_down_and_the_numbering_is_over(tmp_path: Path):
    with (
        MemoryClient(tmp_path, timeout_s=0.02, max_sends=3) as client,
        pytest.raises(ServiceDown, match="sent 3 times"),
    ):
        join(client)
    manager = StallingManager()
    with serving(manager, tmp_path), MemoryClient(tmp_path, timeout_s=0.5, max_sends=2) as client:
        join(client)
        client._timeout_s = 0.02
        with pytest.raises(ServiceDown):
            client.step(StepParts())
        manager.wake.release()
        with pytest.raises(ValueError, match="not registered"):
            client.step(StepParts())
        client._timeout_s = 20.0
        join(client)
        assert client.step(StepParts()).num == 1


def test_a_refused_step_uses_no_number(run_dir: Path, manager: FakeManager):
    with MemoryClient(run_dir) as client:
        epoch = join(client).epoch
        manager.nums[epoch] = 5
        with pytest.raises(MemoryServiceError, match="Step 1 after 5"):
            client.step(StepParts())
        manager.nums[epoch] = 0
        assert client.step(StepParts()).num == 1


def test_an_older_epoch_is_fenced_and_the_client_says_so(run_dir: Path, manager: FakeManager):
    with MemoryClient(run_dir) as client:
        epoch = join(client).epoch
        del manager.clients[epoch]
        with pytest.raises(FencedError, match=f"epoch {epoch}"):
            client.renew()
        assert client.registered is None


def test_halves_of_a_step_are_used_in_turn(run_dir: Path):
    with MemoryClient(run_dir) as client:
        join(client)
        with pytest.raises(ValueError, match="without begin_step"):
            client.finish_step()
        client.begin_step(StepParts())
        for other in (lambda: client.begin_step(StepParts()), client.renew, lambda: client.ack_epoch(1)):
            with pytest.raises(ValueError, match="has begun"):
                other()
        assert client.finish_step().num == 1


GARBAGE = [
    [b""],
    [b"x"],
    [b"seq00001"],
    [b"", b"seq00001", b"\x90"],
    [b"short", encode(Renew(1))],
    [b"seq00001", b"body", b"more"],
    [b"frame"] * 500,
]


@pytest.mark.parametrize("link", [MEM, MEM_ADMIN], ids=lambda link: link.name)
def test_garbage_is_counted_and_answered_where_there_is_a_seq(run_dir: Path, link: Link):
    with RawClient(run_dir, link) as raw, MemoryClient(run_dir) as client, AdminClient(run_dir) as admin:
        for frames in GARBAGE:
            raw.socket.send_multipart(frames)
        for body in (
            b"",
            b"\xc1",
            b"garbage",
            msgspec.msgpack.encode(["Nothing"]),
            encode(Stepped(1)),
            bytes(10 << 20),
        ):
            seq, reply = raw.call([b"seq00009", body])
            assert seq == b"seq00009"
            assert isinstance(reply, BadRequest)
        join(client)
        assert client.step(StepParts()).num == 1
        assert admin.get_stats().num_bad_frames == len(GARBAGE) + 6


def test_bytes_that_are_not_even_zmq_end_nothing(run_dir: Path):
    for link in (MEM, MEM_ADMIN):
        for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x01\x7f"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.connect(link.endpoint(run_dir).removeprefix("ipc://"))
                peer.sendall(data)
    with MemoryClient(run_dir) as client:
        join(client)


def test_garbage_on_the_arena_socket_ends_nothing(run_dir: Path):
    for data in (b"", b"garbage", bytes(1 << 16)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(str(run_dir / "arena.sock"))
            # The service may have answered and hung up before all was written.
            with suppress(BrokenPipeError):
                peer.sendall(data)
    fd, *_ = fetch_arena(str(run_dir / "arena.sock"))
    os.close(fd)


def test_a_message_of_ten_megabytes_is_served_and_one_over_the_limit_is_not_sent(run_dir: Path):
    with MemoryClient(run_dir) as client:
        join(client)
        assert client.step(StepParts(opens=[OpenReq(ReqId(1), bytes(10 << 20), 1)])).num == 1
        with pytest.raises(ValueError, match=f"a message may have {MAX_MSG_BYTES}"):
            client.step(StepParts(opens=[OpenReq(ReqId(1), bytes(MAX_MSG_BYTES), 1)]))
        assert client.step(StepParts()).num == 2


def test_an_oversize_frame_costs_only_its_sender_the_connection(run_dir: Path, manager: FakeManager):
    with MemoryClient(run_dir) as client, RawClient(run_dir, MEM) as raw:
        join(client)
        num_handled = manager.num_handled
        raw.socket.send_multipart([b"seq00001", bytes(MAX_MSG_BYTES + 1)])
        assert client.step(StepParts()).num == 1
        assert manager.num_handled == num_handled + 1
        # The sender is cut off and connects again by itself; what it sent is lost.
        register = encode(Register(WIRE_VERSION, "f", "target", [], "x", os.getpid()))
        for number in range(100):
            raw.socket.send_multipart([number.to_bytes(8, "little"), register])
            if raw.socket.poll(200):
                break
        assert isinstance(decoder(MEM.back).decode(raw.socket.recv_multipart()[1]), Registered)


@pytest.mark.parametrize("pid", [-1, 2**22 + 1, 2**40, 2**63])
def test_a_pid_of_no_process_is_refused(run_dir: Path, manager: FakeManager, pid: int):
    with RawClient(run_dir, MEM) as raw:
        register = Register(WIRE_VERSION, "e", "target", [], "x", pid)
        assert raw.call([b"seq00001", encode(register)])[1] == BadRequest(f"pid {pid} is no running process here")
    assert manager.clients == {}


def test_a_killed_client_is_noticed(run_dir: Path, manager: FakeManager):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child, RawClient(run_dir, MEM) as raw, MemoryClient(run_dir) as client:
        registered = raw.call([b"seq00001", encode(Register(WIRE_VERSION, "e", "target", [], "x", child.pid))])[1]
        assert isinstance(registered, Registered)
        join(client, "other")
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        # The pidfd is readable by now, and the loop looks at it before it sleeps again.
        while raw.call([b"seq00002", encode(Renew(registered.epoch))])[1] != Fenced(registered.epoch):
            pass
        assert manager.exited == [registered.epoch]
        client.renew()


def test_leaving_ends_the_watch_and_leaves_no_descriptor(run_dir: Path, manager: FakeManager):
    def num_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    with MemoryClient(run_dir) as client:
        join(client)
        before = num_fds()
        for _ in range(20):
            join(client)
        assert num_fds() == before, "one process needs one pidfd, however often it registers"
        client.leave()
        assert client.registered is None
    assert manager.exited == []


def test_two_clients_do_not_disturb_each_other(run_dir: Path):
    with MemoryClient(run_dir) as first, MemoryClient(run_dir) as second:
        assert join(first).epoch != join(second, role="draft").epoch
        first.begin_step(StepParts(reserve=Reserve([ReqId(1)], [16])))
        assert second.step(StepParts(reserve=Reserve([ReqId(2)], [16]))).grow_rids == [2]
        assert first.finish_step().grow_rids == [1]


def test_a_bug_of_the_manager_ends_the_loop_and_names_the_message(tmp_path: Path, manager: FakeManager):
    with serving(manager, tmp_path) as server, MemoryClient(tmp_path, timeout_s=0.2, max_sends=1) as client:
        with pytest.raises(ServiceDown):
            join(client, "bug")
        server.join()
        (error,) = server.error
        assert isinstance(error, ManagerBug)
        assert "engine='bug'" in str(error)
        assert "AssertionError: planted" in str(error)
        assert "fake_manager.py:" in str(error)
        assert isinstance(error.__cause__, AssertionError)


def test_the_text_of_a_bug_holds_no_tokens(tmp_path: Path, manager: FakeManager):
    tokens = pack_tokens([1_234_567_890, 5])
    with serving(manager, tmp_path) as server, MemoryClient(tmp_path, timeout_s=0.2, max_sends=1) as client:
        join(client)
        manager.replies = None  # type: ignore[assignment]
        with pytest.raises(ServiceDown):
            client.step(StepParts(opens=[OpenReq(ReqId(77), tokens, 1, "tenant", 0)]))
        server.join()
        (error,) = server.error
        assert isinstance(error, ManagerBug)
        assert "rid=77, tokens=<8 bytes>" in str(error)
        assert "tenant" not in str(error)
        assert "TypeError at " in str(error)


def test_a_second_service_in_the_directory_is_refused_and_the_files_go_with_the_first(tmp_path: Path):
    with serving(FakeManager(), tmp_path):
        sockets = {path.name: path.stat() for path in tmp_path.glob("*.sock")}
        assert set(sockets) == {"mem.sock", "mem-admin.sock", "arena.sock"}
        for status in sockets.values():
            assert stat.S_IMODE(status.st_mode) & 0o077 == 0
        with pytest.raises(ValueError, match="another memory service runs in"), serving(FakeManager(), tmp_path):
            pass
        with MemoryClient(tmp_path) as client:
            join(client)
    assert list(tmp_path.glob("*.sock")) == []
