"""Sockets of links: where they may lie, what gets through, and the asyncio side of it."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from memsvc.async_client import AsyncMemoryClient
from memsvc.errors import FencedError, MemoryServiceError, ServiceDown
from memsvc.inbox import PullInbox
from memsvc.registration import StepParts
from memsvc.rpc import AsyncRpc
from memsvc.transport import bind, check_endpoint, connect, make_run_dir
from memsvc.wire.admin import GetStats
from memsvc.wire.base import ReqId
from memsvc.wire.codec import encode
from memsvc.wire.control import Ready
from memsvc.wire.links import ALL_LAUNCH, LINKS, MAX_MSG_BYTES, MEM_ADMIN, Link
from memsvc.wire.mem import Registered, Reserve
from tests.support.fake_manager import FakeManager, StallingManager
from tests.support.memsvc_thread import serving


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
@pytest.mark.parametrize("context_class", [zmq.Context, zmq.asyncio.Context])
def test_both_ends_have_the_types_and_limits_of_the_link(tmp_path: Path, link: Link, context_class: type[zmq.Context]):
    with context_class() as context, bind(context, link, tmp_path) as binder, connect(context, link, tmp_path) as other:
        assert [each.getsockopt(zmq.TYPE) for each in (other, binder)] == [
            getattr(zmq, name) for name in link.sockets.split("/")
        ]
        for each in (binder, other):
            assert (each.getsockopt(zmq.MAXMSGSIZE), each.getsockopt(zmq.LINGER)) == (MAX_MSG_BYTES, 0)
        assert (tmp_path / f"{link.name}.sock").stat().st_mode & 0o077 == 0


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path):
    open_dir = tmp_path / "open"
    open_dir.mkdir(mode=0o755)
    with pytest.raises(ValueError, match="mode 0755, it must be 0700"):
        make_run_dir(open_dir)
    with zmq.Context() as context:
        for bad, reason in ((open_dir, "mode 0755"), (tmp_path / "none", "does not exist"), (Path(__file__), "not a")):
            with pytest.raises(ValueError, match=reason):
                bind(context, ALL_LAUNCH, bad)
    make_run_dir(tmp_path / "made" / "here")
    assert (tmp_path / "made" / "here").stat().st_mode & 0o777 == 0o700


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    with pytest.raises(ValueError, match=f"belongs to uid {real}"):
        make_run_dir(tmp_path)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "inproc://x", "/tmp/x.sock", ""])
def test_only_local_endpoints_are_served(endpoint: str):
    with pytest.raises(ValueError, match="only ipc:// is served"):
        check_endpoint(endpoint)


def test_too_long_a_path_is_named_with_its_length(tmp_path: Path):
    with pytest.raises(ValueError, match="has 150 bytes, the system allows 107"):
        check_endpoint("ipc://" + "x" * 150)


def test_a_pull_inbox_skips_garbage(tmp_path: Path):
    msg = Ready("memsvc", 1)
    with zmq.Context() as context, bind(context, ALL_LAUNCH, tmp_path) as pull:
        inbox = PullInbox(pull, ALL_LAUNCH)
        assert inbox.recv() is None
        with connect(context, ALL_LAUNCH, tmp_path) as push:
            for frames in ([b"garbage"], [b""], [encode(msg), b"more"], [encode(msg)]):
                push.send_multipart(frames)
            assert pull.poll(20_000)
            received = None
            while received is None:
                received = inbox.recv()
            assert (received, inbox.bad_frames.num) == (msg, 3)
            assert inbox.recv() is None


def test_waiting_for_the_call_of_another_task_counts_against_the_limit(tmp_path: Path):
    async def main() -> None:
        with zmq.asyncio.Context() as context:
            rpc = AsyncRpc(context, MEM_ADMIN, tmp_path)
            first = asyncio.create_task(rpc.call(GetStats(), 5.0))
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError):
                await rpc.call(GetStats(), 0.01)
            assert not first.done()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            rpc.close()

    asyncio.run(main())


Body = Callable[[AsyncMemoryClient], Awaitable[None]]


def in_loop(tmp_path: Path, body: Body, manager: FakeManager | None = None) -> None:
    async def main() -> None:
        async with AsyncMemoryClient(tmp_path) as client:
            await body(client)

    with serving(manager or FakeManager(), tmp_path):
        asyncio.run(main())


async def join(client: AsyncMemoryClient) -> Registered:
    return await client.register("e", "draft", ["target_kv"], "fingerprint")


def test_the_async_client_steps_renews_acknowledges_and_leaves(tmp_path: Path):
    async def body(client: AsyncMemoryClient) -> None:
        await join(client)
        assert (await client.step(StepParts(reserve=Reserve([ReqId(3)], [16])))).grow_rids == [3]
        stepped, *_ = await asyncio.gather(client.step(StepParts(done_step=1)), client.renew(), client.renew())
        assert stepped.num == 2
        await client.ack_epoch(client._registration.epoch)
        await client.leave()
        with pytest.raises(ValueError, match="not registered"):
            await client.renew()

    in_loop(tmp_path, body)


def test_the_async_client_raises_what_the_sync_one_raises(tmp_path: Path):
    manager = FakeManager()

    async def body(client: AsyncMemoryClient) -> None:
        epoch = (await join(client)).epoch
        manager.nums[epoch] = 5
        with pytest.raises(MemoryServiceError, match="Step 1 after 5"):
            await client.step(StepParts())
        del manager.clients[epoch]
        with pytest.raises(FencedError):
            await client.renew()
        await join(client)
        assert (await client.step(StepParts())).num == 1

    in_loop(tmp_path, body, manager)


def test_only_one_async_step_is_under_way(tmp_path: Path):
    manager = StallingManager()

    async def body(client: AsyncMemoryClient) -> None:
        await join(client)
        first = asyncio.create_task(client.step(StepParts()))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="Step 1 is under way"):
            await client.step(StepParts())
        manager.wake.release()
        assert (await first).num == 1

    in_loop(tmp_path, body, manager)


def test_a_cancelled_async_step_loses_the_numbering(tmp_path: Path):
    manager = StallingManager()

    async def body(client: AsyncMemoryClient) -> None:
        await join(client)
        task = asyncio.create_task(client.step(StepParts()))
        await asyncio.sleep(0)
        task.cancel()
        manager.wake.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ValueError, match="not registered"):
            await client.step(StepParts())
        await join(client)
        assert (await client.step(StepParts())).num == 1

    in_loop(tmp_path, body, manager)


def test_the_async_client_gives_up_after_its_limit(tmp_path: Path):
    async def main() -> None:
        async with AsyncMemoryClient(tmp_path, timeout_s=0.02, max_sends=2) as client:
            with pytest.raises(ServiceDown, match="sent 2 times"):
                await join(client)

    asyncio.run(main())
