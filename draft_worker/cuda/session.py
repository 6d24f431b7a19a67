"""Everything a draft has made for one place of things in the exchange: stream, tables, network and its graphs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draft_worker.checks import Limits
from draft_worker.config import DraftConfig
from draft_worker.cuda.network import SECTIONS, DraftMemory, DraftStep
from draft_worker.cuda.routes import NUM_NUMBERS, MaterializedRoute, PagedRoute, PerRequestRoute, Route
from draft_worker.cuda.slot_tables import SlotTables
from draft_worker.cuda.turn_times import TurnTimes
from draft_worker.features import exchange_rows
from draft_worker.model import DraftModel
from draft_worker.worker import Memory
from memsvc.device.buckets import bucket_sizes
from memsvc.device.fp8_pages import check_capability
from memsvc.device.graphs import GraphPlan, Places
from memsvc.device.lane import CudaLane, Lane, Words
from memsvc.device.slots import SlotState
from memsvc.slot_layout import SlotLayout
from memsvc.wire.spec import ExchangeMap

DEVICE_TIMES = 2
"""--spec-trace from which device times are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Kept as long as targets come with the same map and feature dtype: graphs hold the addresses."""

    exchange: ExchangeMap
    feature_dtype: str
    limits: Limits
    lane: Lane
    tables: SlotTables
    memory: DraftMemory
    step: DraftStep
    route: Route
    times: TurnTimes | None
    """None unless device times are asked for."""

    def absorb(self, members: Sequence[int]) -> None:
        """Only the features of the members' newest rows, for a turn without drafts: four kernels and no graph."""
        places = Places(self.lane.stage(np.array([*members, 0], dtype=np.int32)), len(members))
        self.step.absorb(places)


class SessionMaker:
    """Makes sessions for one model and one arena."""

    def __init__(self, config: DraftConfig, model: DraftModel, memory: Memory) -> None:
        """Raises ValueError if the device can't read the pages of draft KV."""
        check_capability("--speculative-draft-kv-cache-dtype", memory.pool.shape.dtype, memory.arena.device)
        self._config = config
        self._model = model
        self._memory = memory
        self._num_drafts = config.drafts_per_block(model.shape)

    def lane(self, words: Words) -> Lane:
        """The stream all steps run on."""
        return CudaLane(words)

    @torch.inference_mode()
    def make(self, exchange: ExchangeMap, feature_dtype: str) -> Session:
        """Captures graphs, which takes seconds. Raises ValueError if the map does not fit the exchange."""
        layout, arena, shape = self._memory.layout, self._memory.arena, self._model.shape
        region = arena[layout.exchange_offset : layout.exchange_offset + layout.exchange_bytes]
        slots = self._slots(region, exchange)
        dtype = getattr(torch, feature_dtype)
        num_bytes = exchange.num_rows * shape.feature_width * dtype.itemsize
        if exchange.features < 0 or exchange.features + num_bytes > len(region):
            raise ValueError(
                f"{exchange.num_rows} rows of features from byte {exchange.features} do not fit {len(region)} bytes"
            )
        page_size = layout.page_size
        max_pages = -(-(self._config.context_len + shape.block_size) // page_size)
        tables = SlotTables(exchange.num_slots, max_pages, page_size, arena.device)
        memory = DraftMemory(
            pool=self._memory.pool,
            page_table=tables.on_device,
            slots=slots,
            features=exchange_rows(region, exchange.features, num_bytes, shape.feature_width, dtype),
        )
        lane = self.lane(Words.of_draft(slots))
        sizes = bucket_sizes(self._config.cuda_graph_max_bs, self._config.max_running_requests)
        step = DraftStep(self._model, memory, self._num_drafts, sizes)
        return Session(
            exchange=exchange,
            feature_dtype=feature_dtype,
            limits=self._limits(exchange),
            lane=lane,
            tables=tables,
            memory=memory,
            step=step,
            route=self._route(step, lane, memory, tables),
            times=TurnTimes(slots.length) if self._config.spec_trace >= DEVICE_TIMES else None,
        )

    def _slots(self, region: torch.Tensor, exchange: ExchangeMap) -> SlotState:
        layout = SlotLayout(
            num_slots=exchange.num_slots, block_size=1 + self._num_drafts, vocab=self._model.shape.vocab_size
        )
        end = exchange.slots + layout.num_bytes
        if exchange.slots < 0 or end > len(region):
            raise ValueError(f"slots of {layout.num_bytes} bytes end at {end}, the exchange has {len(region)}")
        return SlotState(layout, region[exchange.slots : end])

    def _limits(self, exchange: ExchangeMap) -> Limits:
        kind, shape = self._memory.pool.kind, self._model.shape
        return Limits(
            max_drafts=self._num_drafts,
            vocab_size=shape.vocab_size,
            window=shape.window,
            first_page=kind.pages_per_frame,
            num_pages=kind.num_pages,
            num_rows=exchange.num_rows,
        )

    def _route(self, step: DraftStep, lane: Lane, memory: DraftMemory, tables: SlotTables) -> Route:
        config, device = self._config, self._memory.arena.device
        match config.propose_route:
            case "materialized":
                return MaterializedRoute(step, lane, self._model.shape, memory, tables.host, self._num_drafts)
            case "per_request":
                return PerRequestRoute(step, lane, device)
            case _:
                plan = GraphPlan(
                    sizes=bucket_sizes(config.cuda_graph_max_bs, config.max_running_requests),
                    sections=SECTIONS,
                    num_numbers=NUM_NUMBERS,
                    is_split=config.spec_trace >= DEVICE_TIMES,
                    is_captured=not config.disable_cuda_graph and device.type == "cuda",
                )
                return PagedRoute.make(step, lane, plan, device)
