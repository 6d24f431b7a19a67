"""The engine on a CUDA device: kernels, graphs, the lane and the links put together."""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from memsvc.device.delta_rules import choose_rule
from memsvc.device.fp8_pages import check_capability
from memsvc.device.lane import CudaLane, Words
from memsvc.device.table_mirror import TableMirror
from target_worker.base import Base
from target_worker.config import DEVICE_TIMES
from target_worker.cuda.device_lines import device_lines
from target_worker.cuda.exchange import Exchange
from target_worker.cuda.executor import DeviceExecutor
from target_worker.cuda.network import TargetMemory, TargetNetwork
from target_worker.cuda.plan_drafting import PlanDrafting
from target_worker.cuda.plan_link import PlanLink, TargetLane
from target_worker.cuda.prefill_backends import PrefillMemory, choose_prefill
from target_worker.cuda.prompt_graphs import MOST_CONTEXT, PromptGraphs, PromptLimits
from target_worker.cuda.prompt_states import PromptStates
from target_worker.cuda.prompts import Chunk, PromptStep, TritonPrefill
from target_worker.cuda.scheduler import Neighbours, PipelinedScheduler
from target_worker.cuda.state_book import StateBook
from target_worker.cuda.states import DeviceStates
from target_worker.cuda.step_times import StepTimes
from target_worker.cuda.verify_step import VerifyConfig, VerifyStep
from target_worker.cuda.work import Order, Parts, StepWork, graph_plan
from target_worker.linear_memory import LinearMemory
from target_worker.mem_link import MemLink
from target_worker.pools import kv_pool, page_tables
from target_worker.state_link import StateLink
from target_worker.step_sizes import prompt_buckets
from target_worker.width import make_width

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0
"""The first prompts compile kernels."""
_FAREWELL_S = 1.0
"""A step takes less, its drafts included."""


class CudaEngine:
    """A PipelinedScheduler with all that it needs, its graphs captured and its kernels compiled."""

    def __init__(self, base: Base) -> None:
        """Raises ValueError if layout, model, config and device do not fit each other, with the numbers."""
        self._base = base
        config = base.config
        exchange = Exchange.of(base)
        self._lane = self.lane(Words.of_target(exchange.slots))
        self._work = self._make_work(exchange)
        if base.arena.is_cuda:
            # All of this was filled on the default stream, for which the lane's does not wait.
            torch.cuda.synchronize(base.arena.device)
        self._warm_up()
        # After everything else that takes memory, which the graphs' pool would otherwise be cut into.
        self._capture_s, self._graph_bytes = self._work.capture()
        self._take_most()
        linear = self._linear
        states = StateLink(base.layout, linear.table, lambda reqs: self._scheduler.catch_up(reqs)) if linear else None
        mem = MemLink(base.client, base.layout, self._tables, states)
        self._link = self._make_link(exchange) if config.draft else None
        drafting = PlanDrafting(self._link, mem, make_width(config), self._lane)
        if self._work.times is not None:
            self._work.times.draft = lambda: drafting.last
        book = StateBook(linear.table, base.layout.page_size) if linear else None
        executor = DeviceExecutor(self._work, base.model.shape.eos_ids, book)
        self._scheduler = PipelinedScheduler(config, Neighbours(mem, base.text_link(), drafting), executor)

    def lane(self, words: Words) -> TargetLane:
        """The stream that all steps run on."""
        return CudaLane(words)

    def _make_work(self, exchange: Exchange) -> StepWork:
        config, model, arena = self._base.config, self._base.model, self._base.arena
        self._tables = page_tables(self._base.layout, config, arena.device)
        mirror = TableMirror(self._tables, arena.device)
        memory = self._make_memory(exchange, mirror.table)
        network = TargetNetwork(model, memory)
        self._prefill_name, prefill = choose_prefill(
            config.attention_backend,
            model.shape,
            PrefillMemory(pool=memory.pool, tables=self._tables, page_table=mirror.table, dtype=model.dtype),
            config.max_prefill_tokens,
        )
        verify = VerifyConfig(
            block_size=config.block_size,
            max_places=config.sizes.max_places,
            simulate_accept_length=config.simulate_accept_length,
        )
        linear = model.shape.linear
        self._rule = choose_rule(model.dtype, arena.device, linear) if linear is not None else None
        states = None
        if memory.states is not None and self._rule is not None:
            states = PromptStates(memory.states, self._rule, self._lane.stage)
        step = VerifyStep(network, memory, verify)
        prompts = PromptStep(network, self._tables, self._lane, prefill, states)
        parts = Parts(
            memory=memory,
            tables=self._tables,
            mirror=mirror,
            verify=step,
            prompts=prompts,
            lane=self._lane,
            prompt_graphs=self._make_prompt_graphs(prompts, step, memory),
        )
        is_timed = config.spec_trace >= DEVICE_TIMES and arena.is_cuda
        plan = graph_plan(
            config.sizes.buckets, is_split=is_timed, is_captured=arena.is_cuda and not config.disable_cuda_graph
        )
        work = StepWork(parts, verify, plan)
        work.times = StepTimes(exchange.slots.length) if is_timed else None
        return work

    def _make_prompt_graphs(self, prompts: PromptStep, verify: VerifyStep, memory: TargetMemory) -> PromptGraphs | None:
        """Of a hybrid there are none: its states are planned on the host."""
        config, shape = self._base.config, self._base.model.shape
        is_dense = memory.states is None and not config.disable_cuda_graph
        self._prompt_buckets = prompt_buckets(config.max_prefill_tokens, config.attention_backend) if is_dense else ()
        # The same kernel, or prompts that never see so much.
        is_unlimited = self._prefill_name == "triton" or config.context_len <= MOST_CONTEXT
        self._is_row_captured = bool(self._prompt_buckets) and is_unlimited
        limits = PromptLimits(
            sizes=self._prompt_buckets,
            max_running_requests=config.max_running_requests,
            feature_rows=config.sizes.feature_rows if memory.features is not None else 0,
            most_context=0 if is_unlimited else MOST_CONTEXT,
            is_captured=self._base.arena.is_cuda,
        )
        attention = TritonPrefill(memory.pool, memory.page_table, shape.group_size)
        return PromptGraphs(prompts, verify, attention, limits) if limits.sizes else None

    def _make_memory(self, exchange: Exchange, page_table: torch.Tensor) -> TargetMemory:
        config, model, arena, layout = self._base.config, self._base.model, self._base.arena, self._base.layout
        self._linear = LinearMemory.of_layout(
            arena, layout, model, max_reqs=config.max_running_requests, block_size=config.block_size,
            state_dtype=config.mamba_ssm_dtype,
        )  # fmt: skip
        pool = kv_pool(arena, layout, model.shape, config)
        check_capability("--kv-cache-dtype", pool.shape.dtype, arena.device)
        return TargetMemory(
            pool=pool,
            page_table=page_table,
            slots=exchange.slots,
            features=exchange.features,
            tap_layers=config.target_layer_ids,
            states=self._linear and DeviceStates.of(arena, self._linear, model, layout.page_size),
        )

    def _warm_up(self) -> None:
        """Prompts of nobody, into the dummy page: kernels are compiled."""
        config, started = self._base.config, time.monotonic()
        logger.info("compiling kernels of prompts attention=%s", self._prefill_name)
        most, ends = config.max_prefill_tokens, min(2, config.max_running_requests)
        # Kernels are compiled anew for one row, for a number of rows that is no multiple of 16, and for one that is. A
        # row alone may always go through a graph, but of more rows still one may be the last of a prompt.
        first = ((max(1, most - 1), 1),) if self._is_row_captured else ((1, 1), (max(1, most - 1), ends))
        for num_tokens, num_ending in (*first, (most, ends)):
            chunks = _nobodys_chunks(num_tokens, config.context_len, num_ending)
            self._work.put(Order(clear=[], members=[], chunks=chunks), lambda: None)
            self._lane.drain(_PATIENCE_S)
        if self._linear is not None:
            self._work.catch_up([0], [0])
            self._lane.drain(_PATIENCE_S)
        logger.info("kernels of prompts compile_s=%.1f", time.monotonic() - started)

    def _take_most(self) -> None:
        """Run the largest step once more, of nobody.

        A capture empties torch's cache. So this process, and no other, holds that step's memory from the start on.
        """
        config = self._base.config
        # With spec_trace >= DEVICE_TIMES blocks are left out of it, and so is their memory: the trace would count them.
        num_blocks = 0 if self._work.times is not None else config.max_running_requests - 1
        chunks = _nobodys_chunks(config.max_prefill_tokens, config.context_len, 1)
        self._work.put(Order(clear=[], members=[0] * num_blocks, chunks=chunks), lambda: None)
        self._lane.drain(_PATIENCE_S)

    def _make_link(self, exchange: Exchange) -> PlanLink:
        contract = self._base.draft_contract(exchange.map)
        return PlanLink(self._base.spec_rpc(), contract, self._lane, exchange.slots.num_drafts)

    def step(self) -> None:
        """See Engine."""
        self._scheduler.step()

    def watch(self, beat: Callable[[], None]) -> None:
        """See Engine."""
        self._scheduler.on_wait = beat
        if self._link is not None:
            self._link.on_wait = beat

    def lines(self) -> list[str]:
        """See Engine."""
        config, device = self._base.config, self._base.arena.device
        graphs = _listed(() if config.disable_cuda_graph else config.sizes.buckets)
        lines = [
            f"attention blocks=triton prompts={self._prefill_name} graphs={graphs}"
            f" prompt_graphs={_listed(self._prompt_buckets)} capture_s={self._capture_s:.1f}"
            f" graph_bytes={self._graph_bytes} max_prefill_tokens={config.max_prefill_tokens}"
        ]
        if self._rule is not None:
            lines.append(f"gated delta nets blocks=triton prompts={self._rule.name}")
        return [*lines, *device_lines(device)] if device.type == "cuda" else lines

    def num_device_bytes(self) -> int:
        """See Engine."""
        device = self._base.arena.device
        return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0

    def close(self) -> None:
        """See Engine. A draft that is gone is not waited for."""
        self._lane.drain(_FAREWELL_S)


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes)) or "none"


def _nobodys_chunks(num_tokens: int, longest: int, num_ending: int) -> list[Chunk]:
    """So many prompt tokens in the dummy slot, at most `longest` in a chunk; the last num_ending chunks end a prompt."""
    size = min(longest, max(1, num_tokens // num_ending))
    lens = [min(size, num_tokens - start) for start in range(0, num_tokens, size)]
    return [Chunk(0, 0, [0] * num, i >= len(lens) - num_ending) for i, num in enumerate(lens)]
