"""A DeviceExecutor over a small poisoned arena, interpreted or on CUDA, driven step by step without a service."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from memsvc.core.config import PoolConfig
from memsvc.core.geometry import make_layout, solve
from memsvc.device.delta_plan import PlanRule
from memsvc.device.delta_rules import choose_rule
from memsvc.device.kv_dtype import AUTO
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.lane import CudaLane, Words
from memsvc.device.page_table import PageTables
from memsvc.device.slots import SlotState
from memsvc.device.table_mirror import TableMirror
from memsvc.slot_layout import SlotLayout
from memsvc.wire.base import ReqId
from memsvc.wire.text import Sampling
from target_worker.cuda.executor import DeviceExecutor, Flight
from target_worker.cuda.network import TargetMemory, TargetNetwork
from target_worker.cuda.prompt_graphs import PromptGraphs, PromptLimits
from target_worker.cuda.prompt_states import PromptStates
from target_worker.cuda.prompts import PromptStep, TritonPrefill
from target_worker.cuda.state_book import StateBook
from target_worker.cuda.states import DeviceStates
from target_worker.cuda.verify_step import VerifyConfig, VerifyStep
from target_worker.cuda.work import Parts, StepWork, graph_plan
from target_worker.linear_memory import LinearMemory
from target_worker.model.config import kind_specs
from target_worker.model.weights import load_target
from target_worker.plan import StepPlan
from target_worker.req import Phase, RecurrentState, Req
from tests.support.plan_rig import HostLane
from tests.support.tiny_hybrid import Frames
from tests.support.tiny_target import page_dtype

PAGE_SIZE = 4
NUM_FRAMES = 100
MAX_REQS = 5


class DeviceTarget:
    """Requests are opened by hand, with pages for as long as they may get."""

    def __init__(
        self,
        folder: Path,
        device: str,
        *,
        block_size: int = 4,
        taps: Sequence[int] = (),
        quantization: str = "",
        kv: str = AUTO,
        states: str = "float32",
        prompt_buckets: Sequence[int] = (),
        **config: Any,
    ):
        """kv: one of KV_CACHE_DTYPES, states: of STATE_DTYPES. prompt_buckets: rows of prompts that go through buckets, of a dense target."""
        self.device, self.kv, self._states = device, kv, states
        self.model, self.shape = load_target(folder, "float32", device, quantization=quantization)
        kinds = kind_specs(self.shape, PAGE_SIZE, "float32", block_size, kv, states)
        geometry = solve(kinds)
        pool = PoolConfig(arena_bytes=NUM_FRAMES * geometry.frame_bytes, page_size=PAGE_SIZE, kinds=kinds)
        self.layout = make_layout(pool, geometry)
        self.arena = torch.full((self.layout.arena_bytes,), 0xFF, dtype=torch.uint8, device=device)
        self.frames = Frames(self.layout.kinds, self.layout.num_frames)
        layout = SlotLayout(num_slots=MAX_REQS, block_size=block_size, vocab=self.shape.vocab_size)
        region = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self.slots = SlotState(layout, region)
        self.slots.reset()
        self.tables = PageTables(max_reqs=MAX_REQS, max_pages=24, page_size=PAGE_SIZE)
        width = len(taps) * self.shape.hidden_size
        self.features = torch.full((128, width), torch.nan, device=device) if taps else None
        words = Words.of_target(self.slots)
        self.lane = CudaLane(words) if device == "cuda" else HostLane(words)
        verify = VerifyConfig(block_size=block_size, max_places=MAX_REQS, **config)
        parts = self._parts(tuple(taps), verify, tuple(prompt_buckets))
        plan = graph_plan((1, 2, 4, 5), is_split=False, is_captured=device == "cuda")
        self.work = StepWork(parts, verify, plan)
        self.work.capture()
        book = StateBook(self.linear.table, PAGE_SIZE) if self.linear else None
        self.executor = DeviceExecutor(self.work, self.shape.eos_ids, book)

    def _parts(self, taps: tuple[int, ...], verify: VerifyConfig, prompt_buckets: tuple[int, ...]) -> Parts:
        shape = self.shape
        kv = KvShape(
            num_layers=shape.num_full_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            dtype=page_dtype(self.kv, self.model.dtype),
        )  # fmt: skip
        self.linear = LinearMemory.of_layout(
            self.arena, self.layout, self.model, max_reqs=MAX_REQS, block_size=verify.block_size,
            state_dtype=self._states,
        )  # fmt: skip
        states = self.linear and DeviceStates.of(self.arena, self.linear, self.model, PAGE_SIZE)
        mirror = TableMirror(self.tables, self.device)
        self.memory = memory = TargetMemory(
            pool=KvPool(self.arena, self.layout.kinds[0], kv), page_table=mirror.table, slots=self.slots,
            features=self.features, tap_layers=taps, states=states,
        )  # fmt: skip
        network = TargetNetwork(self.model, memory)
        prefill = TritonPrefill(memory.pool, mirror.table, shape.group_size)
        recur = states and PromptStates(states, self._rule(), self.lane.stage)
        limits = PromptLimits(
            sizes=prompt_buckets, max_running_requests=MAX_REQS,
            feature_rows=len(self.features) if self.features is not None else 0, is_captured=self.device == "cuda",
        )  # fmt: skip
        step = VerifyStep(network, memory, verify)
        prompts = PromptStep(network, self.tables, self.lane, prefill, recur)
        return Parts(
            memory=memory, tables=self.tables, mirror=mirror, verify=step, prompts=prompts, lane=self.lane,
            prompt_graphs=PromptGraphs(prompts, step, prefill, limits) if prompt_buckets else None,
        )  # fmt: skip

    def _rule(self) -> PlanRule:
        assert self.shape.linear is not None, "a dense target has no rule"
        return choose_rule(self.model.dtype, self.model.device, self.shape.linear)

    def open(self, rid: int, prompt: Sequence[int], num_tokens: int, sampling: Sampling, hit: Req | None = None) -> Req:
        """A request in PREFILL whose pages hold num_tokens tokens. hit: it begins at the state on which that stands."""
        req = Req(ReqId(rid), list(prompt), len(prompt), sampling, 0, "", rid)
        req.row = self.tables.add(req.rid)
        req.phase = Phase.PREFILL
        shared, state_in = [], []
        if hit is not None:
            assert hit.state is not None, "the hit has no state"
            req.computed_len = hit.state.length
            shared = self.tables.table[hit.row, : req.computed_len // PAGE_SIZE].tolist()
            state_in = self.freeze(hit)
        own = self.frames.take("target_kv", -(-num_tokens // PAGE_SIZE) - len(shared))
        self.tables.set_row(req.rid, shared + own)
        if self.linear is not None:
            table = self.linear.table
            ring = self.frames.take("ring", table.ring[req.row].size)
            state_out = self.frames.take("state", table.num_layers)
            table.open(req.row, state_out=state_out, ring=ring, state_in=state_in)
            req.state = RecurrentState(req.computed_len, req.computed_len, [])
        return req

    def freeze(self, req: Req) -> list[Any]:
        """The pages of the state on which req stands, as far as results are read; it goes on with others."""
        assert self.linear is not None, "a dense target has no states"
        pages = self.linear.table.state_in[req.row].tolist()
        self.linear.table.freeze(req.row, self.frames.take("state", len(pages)))
        return pages

    def close(self, req: Req) -> None:
        """Another may take the slot. Its pages are given back, dirty as they are."""
        if self.linear is not None:
            table = self.linear.table
            self.frames.free["state"] += table.state_out[req.row].tolist()
            self.frames.free["ring"] += table.ring[req.row].flatten().tolist()
            table.close(req.row)
        self.frames.free["target_kv"] += [page for page in self.tables.table[req.row].tolist() if page]
        self.tables.remove(req.rid)
        self.executor.close(req.row)

    def draft(self, req: Req, drafts: Sequence[int]) -> None:
        """What a draft worker would have left in the slot."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.slots.drafts[req.row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32, device=self.device)
        self.slots.num_drafts[req.row] = len(drafts)

    def step(self, decode: Sequence[Req], chunks: dict[Req, int] | None = None) -> dict[Req, list[int]]:
        """Put a step on the device and read it; tokens go to the requests as the scheduler books them."""
        return self.collect(self.submit(StepPlan(decode=list(decode), chunks=dict(chunks or {}))))

    def submit(self, plan: StepPlan) -> Flight:
        """Put a step on the device."""
        return self.executor.submit(plan, [], plan.decode, lambda: None)

    def collect(self, flight: Flight) -> dict[Req, list[int]]:
        """Read a step; tokens go to the requests."""
        emitted = self.executor.collect(flight, self.wait)
        for req, tokens in emitted.items():
            req.tokens.extend(tokens)
            req.phase = Phase.DECODE
        return emitted

    @staticmethod
    def wait(is_over: Callable[[], bool]) -> None:
        while not is_over():
            pass
