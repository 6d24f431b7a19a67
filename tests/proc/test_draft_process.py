"""The draft worker as a process beside a real memory service."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from safetensors.torch import load_file

from draft_worker.config import DraftConfig, kind_specs
from draft_worker.shape import DraftShape
from memsvc.client import AdminClient, MemoryClient
from memsvc.device.arena_map import map_arena
from memsvc.registration import StepParts
from memsvc.rpc import Rpc
from memsvc.transport import bind, connect
from memsvc.wire.base import WIRE_VERSION, BadRequest, Epoch, ReqId, pack_tokens, unpack_tokens
from memsvc.wire.codec import decoder, encode
from memsvc.wire.control import Fatal, Ready
from memsvc.wire.links import ALL_LAUNCH, SPEC
from memsvc.wire.mem import OpenReq, Reserve
from memsvc.wire.spec import Drafted, DraftHello, DraftOpen, DraftReady, Propose
from tests.support.dflash_oracle import DFlashOracle
from tests.support.draft_rig import GREEDY
from tests.support.make_drafter import make_drafter, make_target_stub
from tests.support.memsvc_process import ROOT, memory_service

PAGE_SIZE = 4
TIMEOUT_S = 60.0
EMPTY = Propose([], [], [], [], [], [], [], [], [], [], 0, [], [], [], [])


@dataclass
class World:
    """A run directory with drafter, target stub and a running memory service."""

    run_dir: Path
    config: DraftConfig
    shape: DraftShape
    service: subprocess.Popen[str]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    target = make_target_stub(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target, sliding_window=32)
    config = DraftConfig(
        run_dir=str(run_dir), draft_path=str(drafter), target_path=str(target), dtype="float32",
        context_len=128, num_threads=1,
    )  # fmt: skip
    shape = DraftShape.from_folder(drafter)
    (kind,) = kind_specs(shape, PAGE_SIZE, "float32")
    flags = [
        "--arena-bytes", "4M", "--page-size", str(PAGE_SIZE), "--exchange-bytes", str(64 * shape.feature_width * 4),
        "--lease-ms", "900",
        "--kind", f"target_kv:4096:{PAGE_SIZE}", "--kind", f"draft_kv:{kind.page_bytes}:{PAGE_SIZE}:{kind.window}",
    ]  # fmt: skip
    with memory_service(run_dir, flags) as service:
        yield World(run_dir, config, shape, service)


@contextlib.contextmanager
def unmet_process(world: World, **changes: Any) -> Iterator[tuple[subprocess.Popen[str], zmq.Socket[bytes], Rpc]]:
    """`python -m draft_worker`, where it announces itself, and a way to it; killed at the end if it still runs."""
    file = world.run_dir / "draft.json"
    file.write_text(json.dumps(asdict(replace(world.config, **changes))))
    with (
        zmq.Context() as context,
        bind(context, ALL_LAUNCH, world.run_dir) as announcements,
        contextlib.closing(Rpc(context, SPEC, world.run_dir)) as rpc,
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "draft_worker", "--config", str(file)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        try:
            yield process, announcements, rpc
        finally:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def draft_process(world: World, **changes: Any) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """The process and what it announced, after a hello of somebody who asks for nothing."""
    with unmet_process(world, **changes) as (process, announcements, rpc):
        rpc.send(DraftHello(WIRE_VERSION, "main", Epoch(0), world.shape.target_hidden_size, "float32"))
        yield process, announced(announcements)


def announced(announcements: "zmq.Socket[bytes]") -> Any:
    assert announcements.poll(TIMEOUT_S * 1000), "nothing announced"
    return decoder(ALL_LAUNCH.there).decode(announcements.recv())


def ended(process: subprocess.Popen[str]) -> int:
    """Exit status, waited for without a loop."""
    pidfd = os.pidfd_open(process.pid)
    try:
        assert select.select([pidfd], [], [], TIMEOUT_S)[0], "still running"
    finally:
        os.close(pidfd)
    return process.wait()


class Target:
    """The target's side: registered with the service, and talking to the draft."""

    def __init__(self, world: World, context: zmq.Context) -> None:
        self.world = world
        self.client = MemoryClient(world.run_dir, timeout_s=10.0)
        self.registered = self.client.register("main", "target", ["target_kv", "draft_kv"], "stub")
        self.rpc = Rpc(context, SPEC, world.run_dir)
        layout = self.registered.layout
        arena = map_arena(self.registered.fd_endpoint, layout.arena_bytes)
        region = arena[layout.exchange_offset : layout.exchange_offset + layout.exchange_bytes]
        self.exchange = region[: 64 * world.shape.feature_width * 4].view(torch.float32).view(64, -1)

    def call(self, msg: Any) -> Any:
        return self.rpc.call(msg, TIMEOUT_S)

    def hello(self) -> Any:
        width = self.world.shape.target_hidden_size
        return self.call(DraftHello(WIRE_VERSION, "main", self.registered.epoch, width, "float32"))

    def close(self) -> None:
        self.rpc.close()
        self.client.close()


@pytest.fixture
def target(world: World) -> Iterator[Target]:
    with zmq.Context() as context:
        made = Target(world, context)
        yield made
        made.close()


def open_with_pages(target: Target, rid: int, tokens: list[int]) -> DraftOpen:
    """Open rid with the service, take pages for all of its tokens, and say so to the draft."""
    rids = [ReqId(rid)]
    target.client.step(StepParts(opens=[OpenReq(rids[0], pack_tokens(tokens[:-1]), 32)]))
    grown = target.client.step(StepParts(reserve=Reserve(rids, [len(tokens) + 8])))
    names = [kind.name for kind in target.registered.layout.kinds]
    kind = names.index("draft_kv")
    pages = {i: p for k, i, p in zip(grown.grow_kinds, grown.grow_idxs, grown.grow_pages, strict=True) if k == kind}
    table = [pages[index] for index in range(len(pages))]
    return DraftOpen(rids[0], 0, 0, table, len(tokens) - 1, pack_tokens(tokens), GREEDY)


def test_it_drafts_from_the_shared_arena_what_the_oracle_does_and_stops_cleanly(world, target):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, world.shape.vocab_size, 14).tolist()
    features = torch.from_numpy(rng.standard_normal((13, world.shape.feature_width))).float()
    with draft_process(world) as (process, ready):
        assert isinstance(ready, Ready)
        assert (ready.role, ready.pid) == ("draft", process.pid)
        reply = target.hello()
        assert isinstance(reply, DraftReady)
        assert (reply.block_size, reply.pid) == (8, process.pid)
        target.exchange[5:18] = features
        msg = Propose(
            [], [open_with_pages(target, 1, tokens)], [], [], [], [], [ReqId(1)], [0], [13], [5],
            7, [ReqId(1)], [tokens[-1]], [13], [b""],
        )  # fmt: skip
        drafted = target.call(msg)
        assert isinstance(drafted, Drafted), drafted
        process.send_signal(signal.SIGTERM)
        assert ended(process) == 0
    stub = load_file(Path(world.config.target_path) / "model.safetensors")
    drafter = Path(world.config.draft_path)
    oracle = DFlashOracle(
        json.loads((drafter / "config.json").read_text()), load_file(drafter / "model.safetensors"),
        stub["model.embed_tokens.weight"], stub["lm_head.weight"],
    )  # fmt: skip
    assert unpack_tokens(drafted.token_ids) == oracle.propose(dict(enumerate(features)), tokens[-1], 13, 7)


def test_it_says_ready_once_a_target_has_said_hello(world, target):
    with unmet_process(world) as (_, announcements, rpc):
        assert isinstance(rpc.call(EMPTY, TIMEOUT_S), BadRequest)
        assert not announcements.poll(0)
        assert isinstance(target.hello(), DraftReady)
        assert isinstance(announced(announcements), Ready)


def test_garbage_and_strangers_do_not_end_the_loop(world, target):
    with draft_process(world) as (_, ready), zmq.Context() as context:
        assert isinstance(ready, Ready)
        with connect(context, SPEC, world.run_dir) as stranger:
            stranger.send_multipart([b"short", b"\xff"])
            stranger.send_multipart([b"12345678", b"\xff\xff"])
            assert stranger.poll(TIMEOUT_S * 1000)
            assert isinstance(decoder(SPEC.back).decode(stranger.recv_multipart()[1]), BadRequest)
            assert isinstance(target.hello(), DraftReady)
            stranger.send_multipart([b"12345678", encode(EMPTY)])
            assert stranger.poll(TIMEOUT_S * 1000)
            refused = decoder(SPEC.back).decode(stranger.recv_multipart()[1])
            assert "did not say DraftHello" in refused.reason
        assert isinstance(target.call(EMPTY), Drafted)


DOOMED = """
import select, sys
from pathlib import Path
from memsvc.client import MemoryClient
from memsvc.registration import StepParts
from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.mem import OpenReq, Reserve
client = MemoryClient(Path(sys.argv[1]))
registered = client.register("main", "target", ["target_kv", "draft_kv"], "stub")
client.step(StepParts(opens=[OpenReq(ReqId(1), pack_tokens(list(range(20))), 32)]))
client.step(StepParts(reserve=Reserve([ReqId(1)], [20])))
print(registered.epoch, flush=True)
select.select([], [], [])
"""


def in_quarantine(admin: AdminClient) -> int:
    return sum(kind.num_quarantine for kind in admin.get_stats().kinds)


def test_hello_of_a_new_epoch_frees_what_a_killed_target_left(world):
    """memsvc keeps a dead target's private pages until the draft says that it touches them no more."""
    with (
        draft_process(world) as (_, ready),
        AdminClient(world.run_dir) as admin,
        zmq.Context() as context,
        subprocess.Popen(
            [sys.executable, "-c", DOOMED, str(world.run_dir)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as doomed,
    ):
        assert isinstance(ready, Ready)
        assert doomed.stdout is not None
        old_epoch = int(doomed.stdout.readline())
        doomed.kill()
        doomed.wait()
        target = Target(world, context)
        assert in_quarantine(admin) > 0
        assert isinstance(target.hello(), DraftReady)
        while in_quarantine(admin):  # the service hears of the death and of the acknowledgement in either order
            pass
        late = DraftHello(WIRE_VERSION, "main", Epoch(old_epoch), world.shape.target_hidden_size, "float32")
        assert "registered as" in target.call(late).reason
        target.close()


def test_it_ends_with_an_error_when_another_process_took_its_place(world):
    """Its renewals are answered Fenced, and it must not touch pages any more."""
    with draft_process(world) as (process, ready), MemoryClient(world.run_dir) as other:
        assert isinstance(ready, Ready)
        other.register("main", "draft", ["draft_kv"], "another")
        assert ended(process) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"draft_path": "nowhere"}, "nowhere"), ({"num_draft_tokens": 8}, "8 drafts a block are asked for")],
)
def test_what_cannot_start_is_announced_as_fatal(changes, message, world):
    with draft_process(world, **changes) as (process, fatal):
        assert isinstance(fatal, Fatal)
        assert message in fatal.message
        assert ended(process) == 1


def test_random_weights_start_from_config_files_alone(world, target):
    for folder in (world.config.draft_path, world.config.target_path):
        (Path(folder) / "model.safetensors").unlink()
    with draft_process(world, load_format="dummy", num_draft_tokens=3) as (_, ready):
        assert isinstance(ready, Ready)
        assert target.hello().block_size == 4
