"""ToyEngine's counterpart on a device: the pipelined scheduler, real links, and a toy device, draft and model."""

import random
from collections.abc import Callable

from msgspec import structs

from memsvc.core.manager import MemoryManager
from memsvc.device.page_table import PageTables
from memsvc.device.state_table import StateTable
from memsvc.wire.base import Epoch, FinishReason, ReqId
from memsvc.wire.mem import KindSpec
from memsvc.wire.spec import ExchangeMap
from target_worker.config import TargetConfig
from target_worker.cuda.executor import DeviceExecutor
from target_worker.cuda.plan_drafting import PlanDrafting
from target_worker.cuda.scheduler import Neighbours, PipelinedScheduler
from target_worker.cuda.state_book import StateBook
from target_worker.draft_peer import DraftContract
from target_worker.mem_link import MemLink
from target_worker.req import Phase, Req
from target_worker.state_link import StateLink
from target_worker.width import Width, make_width
from tests.support.toy_device import ToyDevice, ToyLane
from tests.support.toy_device_states import ToyDeviceStates
from tests.support.toy_plan_draft import ToyPlanDraft, ToyPlanLink, ToyRpc
from tests.support.toy_server import (
    DRAFT_PAGE_BYTES,
    EOS,
    TARGET_PAGE_BYTES,
    ToyClient,
    ToyServer,
    ToyText,
    continuation,
    pool_config,
)
from tests.support.toy_states import NUM_LAYERS, toy_kinds
from tests.support.toy_watch import PoolWatch
from tests.support.toy_work import ToyWork

MAX_PAGES = 256


class CheckedText(ToyText):
    """Compares every token with the model's as soon as it comes."""

    def __init__(self, answer_of: Callable[[ReqId], list[int]]) -> None:
        super().__init__()
        self._answer_of = answer_of

    def add(self, req, tokens: list[int]) -> None:
        super().add(req, tokens)
        text = self.tokens[req.rid]
        assert text == self._answer_of(req.rid)[: len(text)], f"rid {req.rid} gets another text"


class PipelinedEngine(ToyServer):
    """k = 0 means no draft process and no draft pages."""

    def __init__(
        self, *, num_frames: int, page_size: int = 4, k: int = 0, max_running: int = 4, max_prefill: int = 16,
        wrong_every: int = 3, manager: MemoryManager | None = None, engine: str = "toy", width: Width | None = None,
        window: int = 0, seed: int = 0, recurrent: bool = False,
    ) -> None:  # fmt: skip
        """seed: 0 runs the device as late as possible, others at random as early as possible. As ToyEngine besides."""
        kinds = [KindSpec("target_kv", TARGET_PAGE_BYTES, page_size), *(toy_kinds() if recurrent else [])]
        if k:
            kinds.append(KindSpec("draft_kv", DRAFT_PAGE_BYTES, page_size, window=window))
        self.manager = manager or MemoryManager(pool_config(kinds, page_size, num_frames))
        self.client = client = ToyClient(self.manager, engine)
        config = TargetConfig(
            run_dir="", model_path="", max_running_requests=max_running, max_prefill_tokens=max_prefill,
            page_size=page_size, num_draft_tokens=k, draft=k > 0, target_layer_ids=(0,) if k else (), device="cuda",
        )  # fmt: skip
        rng = random.Random(seed) if seed else None
        tables = PageTables(max_reqs=max_running, max_pages=MAX_PAGES, page_size=page_size)
        watch = PoolWatch(self.manager)
        table = StateTable(max_reqs=max_running, num_layers=NUM_LAYERS) if recurrent else None
        self.states = ToyDeviceStates(table, page_size, 1 + k, watch) if table else None
        link = StateLink(client.registered.layout, table, lambda reqs: self.scheduler.catch_up(reqs)) if table else None
        mem = MemLink(client, client.registered.layout, tables, link)
        places = 1 << (max_running - 1).bit_length()
        self.device = ToyDevice(max_running, places * (1 + k) + max_prefill, watch, rng)
        self.work = ToyWork(self.device, tables, 1 + k, self._req_of, self.states)
        self.executor = DeviceExecutor(self.work, (EOS,), StateBook(table, page_size) if table else None)
        self.lane = ToyLane(self.device)
        self.text = CheckedText(lambda rid: self._answers[rid])
        self._answers: dict[ReqId, list[int]] = {}
        self.spec = self.link = self.rpc = None
        layout = client.registered.layout
        if k:
            self.spec = ToyPlanDraft(self.device, layout, k, wrong_every, MAX_PAGES)
            self.spec.is_wanted = lambda slot: any(req.phase is Phase.DECODE for req in self._reqs_of(slot))
            self.rpc = ToyRpc(self.spec, rng)
            exchange = ExchangeMap(0, max_running, 0, len(self.device.exchange))
            contract = DraftContract(engine, Epoch(client.registered.epoch), 8, "float32", 1 + k, (0,), exchange)
            self.link = ToyPlanLink(self.rpc, contract, self.lane, None)  # type: ignore[arg-type]
            self.link.draft = self.spec
        drafting = PlanDrafting(self.link, mem, width or make_width(config), self.lane)  # type: ignore[arg-type]
        self.scheduler = PipelinedScheduler(config, Neighbours(mem, self.text, drafting), self.executor)  # type: ignore[arg-type]
        self.prompts = {}

    def _req_of(self, slot: int) -> Req:
        (req,) = self._reqs_of(slot)
        return req

    def _reqs_of(self, slot: int) -> list[Req]:
        return [req for req in self.scheduler._running.values() if req.row == slot]

    def check_accounts(self) -> None:
        """What was told of accepted drafts is what happened on the device. Not for loads in which drafts die."""
        for rid, usage in self.text.usages.items():
            if self.text.finished[rid] is not FinishReason.ABORT:
                assert usage.accepted == self.work.writer.accepted.get(rid, []), f"rid {rid}"

    def submit(self, rid: int, prompt: list[int], max_tokens: int, *, priority: int = 0, out: int = 0) -> None:
        """See ToyServer."""
        self._answers[ReqId(rid)] = continuation(prompt, max_tokens)
        super().submit(rid, prompt, max_tokens, priority=priority, out=out)

    def step(self) -> None:
        """See ToyServer."""
        self.scheduler.step()

    def step_demanding(self, rid: int) -> None:
        """One step in which the memory service takes a request's memory back."""
        plain = self.client.finish_step
        self.client.finish_step = lambda: structs.replace(plain(), retract=[ReqId(rid)])
        try:
            self.step()
        finally:
            self.client.finish_step = plain
