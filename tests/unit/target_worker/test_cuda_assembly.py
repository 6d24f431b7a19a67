"""The engine of a CUDA device put together from what launch plans: interpreted on the CPU, and captured on CUDA."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
import zmq

pytest.importorskip("triton", reason="triton is not installed")

from draft_worker.config import DRAFT_KV, DraftConfig
from draft_worker.cuda.worker import PlanWorker
from draft_worker.shape import DraftShape
from draft_worker.weights import load_model
from draft_worker.worker import Memory
from launch.config import LaunchConfig
from launch.models import read_models
from launch.planner import make_plan
from launch.specs import Run
from memsvc.core.manager import MemoryManager
from memsvc.device.kv_dtype import FP8_E4M3, KV_CACHE_DTYPES
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.lane import Words
from memsvc.rpc import Rpc
from memsvc.wire.base import Msg, ReqId, pack_tokens
from memsvc.wire.codec import decoder, encode
from memsvc.wire.links import SPEC
from memsvc.wire.text import Admit, Sampling
from target_worker.base import Base
from target_worker.config import TargetConfig
from target_worker.cuda import assembly
from target_worker.cuda.assembly import CudaEngine
from target_worker.cuda.exchange import Exchange
from target_worker.cuda.order import Order
from target_worker.cuda.plan_link import TargetLane
from target_worker.cuda.work import StepWork
from target_worker.keeper import RequestKeeper
from target_worker.model.weights import load_target
from target_worker.runner import Segment
from tests.support import kernel_bounds
from tests.support.host_lane import HostTargetLane
from tests.support.make_drafter import V1, make_drafter
from tests.support.plan_rig import HostSessions
from tests.support.tiny_hybrid import HybridRig, make_hybrid
from tests.support.tiny_target import TargetRig, make_target, page_dtype
from tests.support.toy_server import ToyClient, ToyText
from tests.unit.launch.test_device_plan import CARD

PROMPTS = {1: [5, 9, 11, 30, 3], 2: [21, 17]}
NUM_NEW = 3


class DirectRpc:
    """An Rpc to a draft in this process, which answers at once."""

    def __init__(self, worker: PlanWorker) -> None:
        self._worker = worker
        self._reply = b""

    def send(self, msg: Msg) -> None:
        self._reply = encode(self._worker.handle(decoder(SPEC.there).decode(encode(msg))))

    def recv(self, _timeout_s: float) -> Any:
        return decoder(SPEC.back).decode(self._reply)


class ToyBase(Base):
    """The tokenizer's side is `texts`. At the draft's end of its link is `draft`, or nobody."""

    texts = ToyText()
    draft: ClassVar[PlanWorker | None] = None
    links: ClassVar[list[Rpc]] = []
    """Alive until their context is destroyed, as the worker's are."""

    def text_link(self):
        return self.texts

    def spec_rpc(self) -> Any:
        if self.draft is not None:
            return DirectRpc(self.draft)
        self.links.append(super().spec_rpc())
        return self.links[-1]


class HostEngine(CudaEngine):
    """On a lane that is done at once."""

    def lane(self, words: Words) -> TargetLane:
        return HostTargetLane(words)


@pytest.fixture(autouse=True)
def rows_of_one_load_lie_in_ring_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_bounds.allow_several_operands(monkeypatch)


@pytest.fixture(scope="module", params=["Llama", "hybrid"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a target and its drafter."""
    target, drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    if request.param == "Llama":
        make_target(target, "Llama", num_hidden_layers=1, **sizes)
    else:
        make_hybrid(
            target, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], intermediate_size=48,
            num_key_value_heads=1, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, **sizes,
        )  # fmt: skip
    make_drafter(drafter, target, V1, num_hidden_layers=1, block_size=2, target_layer_ids=[0])
    return target, drafter


@pytest.fixture(params=KV_CACHE_DTYPES)
def kv(request: pytest.FixtureRequest) -> str:
    """Of the pages of both."""
    return request.param


@pytest.fixture
def base(folders: tuple[Path, Path], kv: str, tmp_path: Path, device: str) -> Iterator[ToyBase]:
    """As launch starts it, with an arena whose bytes are NaN."""
    target, drafter = folders
    config = LaunchConfig(
        model_path=str(target), draft_model_path=str(drafter), device="cuda", dtype="float32", page_size=4, num_drafts=1,
        max_running_requests=2, max_prefill_tokens=4, context_len=24, mem_bytes=1 << 22,
        kv_cache_dtype=kv, draft_kv_cache_dtype=kv,
    )  # fmt: skip
    models = read_models(config, target)
    pool, plan = make_plan(config, models, card=replace(CARD, unit=1 << 12))
    run = Run(
        config=config, model_path=target, models=models, pool=pool, plan=plan, run_dir=tmp_path,
        listener=None, command=(),  # type: ignore[arg-type]
    )  # fmt: skip
    for role in ("target", "draft"):
        run.spec(role, 1)
    client = ToyClient(MemoryManager(pool), "main")
    ToyBase.texts, ToyBase.draft = ToyText(), None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield ToyBase(
        config=msgspec.json.decode((tmp_path / "target.json").read_bytes(), type=TargetConfig),
        run_dir=tmp_path,
        context=context,
        client=client,  # type: ignore[arg-type]
        registered=client.registered,
        arena=torch.full((pool.arena_bytes,), 0xFF, dtype=torch.uint8, device=device),
        model=load_target(target, "float32", device)[0],
    )
    context.destroy(linger=0)
    ToyBase.links.clear()


def greedy(folder: Path, prompt: list[int], kv: str) -> list[int]:
    """What the CPU's runner gives."""
    tokens = list(prompt)
    for _ in range(NUM_NEW):
        model = load_target(folder, "float32")[0]
        rig = HybridRig(folder, kv=kv) if model.delta_layers else TargetRig(folder, kv=kv)
        row = rig.open(1, 24)
        row = row if isinstance(row, int) else row.row
        logits = rig.runner.forward([Segment(row, 0, tokens, 1, num_certain=len(tokens))])
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


def test_launch_and_target_agree_on_the_exchange(base: ToyBase):
    exchange = Exchange.of(base)
    assert exchange.features is not None
    assert len(exchange.features) == exchange.map.num_rows == 2 * 2 + 4
    assert (exchange.map.num_slots, exchange.map.slots % 256) == (2, 0)
    assert exchange.slots.words[0] == 0
    assert exchange.slots.done.tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match=r"rows of features and 2 slots need \d+ bytes, the exchange has \d+"):
        Exchange.of(replace(base, config=replace(base.config, max_prefill_tokens=500)))


def run(base: ToyBase, engine: CudaEngine, prompts: dict[int, list[int]]) -> None:
    """Until all have their answers."""
    sampling = Sampling(temperature=0.0, seed=1, max_tokens=NUM_NEW, ignore_eos=True)
    for rid, prompt in prompts.items():
        base.texts.inbox.append(Admit(ReqId(rid), pack_tokens(prompt), len(prompt), sampling))
    for _ in range(30):
        if engine._scheduler.is_idle and not base.texts.inbox:
            return
        engine.step()


def serve(base: ToyBase) -> RequestKeeper:
    """All prompts, then the first one with its answer and more; the scheduler."""
    engine = CudaEngine(base) if base.arena.is_cuda else HostEngine(base)
    run(base, engine, PROMPTS)
    run(base, engine, {3: [*PROMPTS[1], *base.texts.tokens[ReqId(1)], 8]})
    engine.close()
    assert engine.lines()[0].startswith("attention blocks=triton prompts=triton graphs=1,2 ")
    assert base.texts.failed == {}
    return engine._scheduler


def check_texts(base: ToyBase, folder: Path) -> None:
    """They are the CPU's, and the last turn has begun where the first one's last full page ends."""
    kv = base.config.kv_cache_dtype
    first = [*PROMPTS[1], *greedy(folder, PROMPTS[1], kv)]
    prompts = {**PROMPTS, 3: [*first, 8]}
    assert base.texts.tokens == {rid: greedy(folder, prompt, kv) for rid, prompt in prompts.items()}
    assert base.texts.usages[ReqId(3)].cached_tokens == (len(first) - 1) // 4 * 4


@pytest.mark.parametrize("kv", [FP8_E4M3], indirect=True)
def test_the_start_asks_whether_the_device_reads_the_pages(base: ToyBase, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, torch.dtype, torch.device]] = []
    monkeypatch.setattr(assembly, "check_capability", lambda *given: asked.append(given))
    engine = CudaEngine(base) if base.arena.is_cuda else HostEngine(base)
    engine.close()
    assert asked == [("--kv-cache-dtype", torch.float8_e4m3fn, base.arena.device)]


@pytest.mark.parametrize("kv", ["auto"], indirect=True)
def test_the_largest_step_is_taken_once_graphs_are_there(base: ToyBase, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    put, capture = StepWork.put, StepWork.capture

    def noted(self: StepWork, order: Order, hand_over: Callable[[], None]) -> Any:
        seen.append((len(order.members), sum(len(chunk.token_ids) for chunk in order.chunks)))
        return put(self, order, hand_over)

    monkeypatch.setattr(StepWork, "put", noted)
    monkeypatch.setattr(StepWork, "capture", lambda self: seen.append("capture") or capture(self))
    engine = CudaEngine(base) if base.arena.is_cuda else HostEngine(base)
    engine.close()
    config = base.config
    most = (config.max_running_requests - 1, config.max_prefill_tokens)
    assert seen[-2:] == ["capture", most]
    assert engine._work._parts.memory.slots.done.tolist() == [3, 3, 3], "nobody is in any slot"


def test_the_engine_serves_without_a_draft(base: ToyBase, folders: tuple[Path, Path]):
    serve(base)
    check_texts(base, folders[0])


@pytest.mark.parametrize("kv", ["auto"], indirect=True)
@pytest.mark.parametrize("is_drafted", [False, True], ids=["plain", "drafted"])
def test_prompts_that_end_on_page_edges_are_served_and_hit(base: ToyBase, folders: tuple[Path, Path], is_drafted: bool):
    if is_drafted:
        start_draft(base, folders)
    engine = CudaEngine(base) if base.arena.is_cuda else HostEngine(base)
    prompts = {1: [5, 9, 11, 30, 3, 7, 2, 8], 2: [21, 17, 4, 6]}
    again = {3: prompts[1], 4: prompts[2], 5: [*prompts[1], 9, 1, 4, 12]}
    run(base, engine, prompts)
    for rid, prompt in again.items():
        run(base, engine, {rid: prompt})
    engine.close()
    assert base.texts.failed == {}
    assert base.texts.tokens == {rid: greedy(folders[0], prompt, "auto") for rid, prompt in (prompts | again).items()}
    assert [base.texts.usages[ReqId(rid)].cached_tokens for rid in again] == [4, 0, 8]


def start_draft(base: ToyBase, folders: tuple[Path, Path]) -> list[int]:
    """Have a draft worker at the other end of base's link; where it notes the epochs that it acknowledges."""
    config = msgspec.json.decode((base.run_dir / "draft.json").read_bytes(), type=DraftConfig)
    shape = DraftShape.from_folder(folders[1])
    model = load_model(replace(config, device=str(base.arena.device)), shape)
    kind = next(kind for kind in base.layout.kinds if kind.name == DRAFT_KV)
    dtype = page_dtype(config.kv_cache_dtype, model.dtype)
    kv = KvShape(num_layers=1, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=dtype)
    memory = Memory(arena=base.arena, layout=base.layout, pool=KvPool(base.arena, kind, kv))
    acks: list[int] = []
    maker = None if base.arena.is_cuda else HostSessions(config, model, memory)
    ToyBase.draft = PlanWorker(config, model, memory, acks.append, maker)
    return acks


def test_engine_and_draft_meet_in_the_exchange(base: ToyBase, folders: tuple[Path, Path]):
    acks = start_draft(base, folders)
    scheduler = serve(base)
    check_texts(base, folders[0])
    assert scheduler.counters.num_draft_tokens >= len(PROMPTS)
    assert acks == [base.registered.epoch]
    assert not base.feature_rows(base.feature_bytes)[0].isnan().any(), "the target leaves features"
