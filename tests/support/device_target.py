"""A DeviceExecutor over a small poisoned arena, interpreted or on CUDA, driven step by step without a service."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.lane import CudaLane, Words
from memsvc.device.page_table import PageTables
from memsvc.device.slots import SlotState
from memsvc.device.table_mirror import TableMirror
from memsvc.slot_layout import SlotLayout
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import KindLayout
from memsvc.wire.text import Sampling
from target_worker.cuda.executor import DeviceExecutor, Flight
from target_worker.cuda.network import TargetMemory, TargetNetwork
from target_worker.cuda.prompts import PromptStep, TritonPrefill
from target_worker.cuda.verify_step import VerifyConfig, VerifyStep
from target_worker.cuda.work import Parts, StepWork, graph_plan
from target_worker.model.config import kind_specs
from target_worker.model.weights import load_target
from target_worker.plan import StepPlan
from target_worker.req import Phase, Req
from tests.support.plan_rig import HostLane

PAGE_SIZE = 4
NUM_PAGES = 90
MAX_REQS = 5


class DeviceTarget:
    """Requests are opened by hand, with pages for as long as they may get."""

    def __init__(self, folder: Path, device: str, *, block_size: int = 4, taps: Sequence[int] = (), **config: Any):
        self.device = device
        self.model, self.shape = load_target(folder, "float32", device)
        (spec,) = kind_specs(self.shape, PAGE_SIZE, "float32")
        stride = -(-spec.page_bytes // 256) * 256 + 256
        kind = KindLayout(spec.name, spec.page_bytes, PAGE_SIZE, 0, 0, 3, stride, NUM_PAGES)
        arena = torch.full((NUM_PAGES * stride,), 0xFF, dtype=torch.uint8, device=device)
        kv = KvShape(
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            dtype=self.model.dtype,
        )
        layout = SlotLayout(num_slots=MAX_REQS, block_size=block_size, vocab=self.shape.vocab_size)
        region = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self.slots = SlotState(layout, region)
        self.slots.reset()
        self.tables = PageTables(max_reqs=MAX_REQS, max_pages=24, page_size=PAGE_SIZE)
        width = len(taps) * self.shape.hidden_size
        self.features = torch.full((128, width), torch.nan, device=device) if taps else None
        mirror = TableMirror(self.tables, device)
        self.memory = TargetMemory(
            pool=KvPool(arena, kind, kv), page_table=mirror.table, slots=self.slots,
            features=self.features, tap_layers=tuple(taps),
        )  # fmt: skip
        network = TargetNetwork(self.model, self.memory)
        words = Words.of_target(self.slots)
        self.lane = CudaLane(words) if device == "cuda" else HostLane(words)
        verify = VerifyConfig(block_size=block_size, max_places=MAX_REQS, **config)
        prefill = TritonPrefill(self.memory.pool, mirror.table, self.shape.group_size)
        parts = Parts(
            memory=self.memory,
            tables=self.tables,
            mirror=mirror,
            verify=VerifyStep(network, self.memory, verify),
            prompts=PromptStep(network, self.tables, self.lane, prefill),
            lane=self.lane,
        )
        plan = graph_plan((1, 2, 4, 5), is_split=False, is_captured=device == "cuda")
        self.work = StepWork(parts, verify, plan)
        self.work.capture()
        self.executor = DeviceExecutor(self.work, self.shape.eos_ids)
        self._pages = [PageId(page) for page in torch.randperm(NUM_PAGES - 3).add(3).tolist()]

    def open(self, rid: int, prompt: Sequence[int], num_tokens: int, sampling: Sampling) -> Req:
        """A request in PREFILL whose pages hold num_tokens tokens."""
        req = Req(ReqId(rid), list(prompt), len(prompt), sampling, 0, "", rid)
        req.row = self.tables.add(req.rid)
        req.phase = Phase.PREFILL
        self.tables.set_row(req.rid, [self._pages.pop() for _ in range(-(-num_tokens // PAGE_SIZE))])
        return req

    def draft(self, req: Req, drafts: Sequence[int]) -> None:
        """What a draft worker would have left in the slot."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.slots.drafts[req.row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32, device=self.device)
        self.slots.num_drafts[req.row] = len(drafts)

    def step(self, decode: Sequence[Req], chunks: dict[Req, int] | None = None) -> dict[Req, list[int]]:
        """Put a step on the device and read it; tokens go to the requests as the scheduler books them."""
        plan = StepPlan(decode=list(decode), chunks=dict(chunks or {}))
        emitted = self.executor.collect(self.submit(plan), self.wait)
        for req, tokens in emitted.items():
            req.tokens.extend(tokens)
            req.phase = Phase.DECODE
        return emitted

    def submit(self, plan: StepPlan) -> Flight:
        """Put a step on the device."""
        return self.executor.submit(plan, [], plan.decode, lambda: None)

    @staticmethod
    def wait(is_over: Callable[[], bool]) -> None:
        while not is_over():
            pass
