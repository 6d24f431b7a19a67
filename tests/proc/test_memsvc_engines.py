"""Two engines in processes of their own on one pool: each uses what the other leaves, and nothing is lost with one."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memsvc.client import AdminClient, MemoryClient
from memsvc.registration import StepParts
from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.mem import Close, Commit, NoRoom, Opened, OpenReq, Reserve, TooLarge
from tests.support.memsvc_process import ROOT, memory_service

FLAGS = [
    *("--arena-bytes", "256K", "--page-size", "4", "--high-watermark", "0", "--retract-ms", "60000"),
    *("--kind", "target_kv:1K:4", "--kind", "draft_kv:512:4"),
    *("--kind", "state:4K:0:0:2:state", "--kind", "ring:2K:0:0:2"),
]
HYBRID = ["target_kv", "draft_kv", "state", "ring"]
DENSE = ["target_kv"]

HOLDER = """
import sys
from pathlib import Path
from memsvc.client import MemoryClient
from memsvc.registration import StepParts
from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.mem import Opened, OpenReq, Reserve
run_dir, engine, num, *kinds = sys.argv[1:]
with MemoryClient(Path(run_dir)) as client:
    client.register(engine, "target", kinds, "model of " + engine)
    for rid in range(1, int(num) + 1):
        [opened] = client.step(StepParts(opens=[OpenReq(ReqId(rid), pack_tokens([rid, *range(30)]), 4)])).opened
        assert isinstance(opened, Opened), opened
        assert client.step(StepParts(reserve=Reserve([ReqId(rid)], [31]))).no_room is None
    print("open", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(run_dir: Path, engine: str, num: int, kinds: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A target in a process of its own with num open requests; killed at the end."""
    command = [sys.executable, "-c", HOLDER, str(run_dir), engine, str(num), *kinds]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            yield process
        finally:
            process.kill()


def fill(client: MemoryClient, first: int = 1) -> list[ReqId]:
    """Open requests of 31 tokens until the pool says no."""
    rids: list[ReqId] = []
    while True:
        rid = ReqId(first + len(rids))
        stepped = client.step(StepParts(opens=[OpenReq(rid, pack_tokens([rid, *range(30)]), 4)]))
        if stepped.open_no_room is not None:
            assert isinstance(stepped.open_no_room, NoRoom)
            return rids
        assert isinstance(stepped.opened[0], Opened)
        rids.append(rid)
        if client.step(StepParts(reserve=Reserve([rid], [31]))).no_room is not None:
            return rids


def end_all(client: MemoryClient, rids: list[ReqId]) -> None:
    """Compute and close all, and let limbo drain."""
    num = client.step(StepParts(commit=Commit(rids, [31] * len(rids), [31] * len(rids), [b""] * len(rids)))).num
    num = client.step(StepParts(done_step=num, closes=[Close(rids)])).num
    client.step(StepParts(done_step=num))


def test_each_engine_can_use_what_the_other_leaves(tmp_path: Path):
    flags = [*FLAGS, "--arena-bytes", "4M"]
    with memory_service(tmp_path, flags), AdminClient(tmp_path) as admin:
        with MemoryClient(tmp_path) as a, MemoryClient(tmp_path) as b:
            a.register("a", "target", HYBRID, "model of a")
            b.register("b", "target", DENSE, "model of b")
            alone = {"a": fill(a)}
            assert fill(b) == []
            end_all(a, alone["a"])
            alone["b"] = fill(b)
            # A dense request holds 8 pages of 1 KiB, a hybrid one more than twice the bytes.
            assert len(alone["b"]) > 2 * len(alone["a"]) > 200
            end_all(b, alone["b"])
            # Now the pool is full of cached text, whose frames come back by and by.
            assert len(fill(a, first=1000)) >= 0.95 * len(alone["a"])
        assert admin.check().problems == []


def test_quotas_hold_while_the_other_engine_takes_the_rest(tmp_path: Path):
    flags = [*FLAGS, "--engine-quota", "a=20"]
    with memory_service(tmp_path, flags), AdminClient(tmp_path) as admin:
        with MemoryClient(tmp_path) as a, MemoryClient(tmp_path) as b:
            a.register("a", "target", HYBRID, "model of a")
            b.register("b", "target", DENSE, "model of b")
            mine = fill(a)
            frames = admin.get_stats().frames_empty
            assert 0 < len(mine) <= 20 // 4
            assert len(fill(b)) * 2 > frames // 2
            large = OpenReq(ReqId(500), pack_tokens(list(range(400))), 4)
            [answer] = a.step(StepParts(opens=[large])).opened
            assert isinstance(answer, TooLarge)
            assert answer.frames_usable == 20
        assert admin.check().problems == []


def test_a_killed_engine_gives_its_private_bytes_back_once_its_co_writer_has_acknowledged(tmp_path: Path):
    with memory_service(tmp_path, FLAGS), AdminClient(tmp_path) as admin, MemoryClient(tmp_path) as b:
        b.register("b", "target", DENSE, "model of b")
        alone = len(fill(b))
        b.leave()
        b.register("b", "target", DENSE, "model of b")
        with MemoryClient(tmp_path) as draft, holder(tmp_path, "a", 3, HYBRID) as target:
            co_writer = draft.register("a", "draft", ["draft_kv"], "draft of a")
            target.kill()
            target.wait()
            while admin.get_stats().num_clients > 2:
                pass
            held = admin.get_stats()
            assert held.num_reqs == 0
            assert all(kind.num_quarantine for kind in held.kinds)
            draft.ack_epoch(co_writer.epoch)
            freed = admin.get_stats()
            assert all(kind.num_quarantine == kind.num_private == 0 for kind in freed.kinds)
            assert freed.frames_empty == freed.num_frames - 1
        assert len(fill(b)) == alone
        assert admin.check().problems == []
