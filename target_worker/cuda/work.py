"""The device's side of a step: what is enqueued for it on the lane, from slots, pages and tokens alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memsvc.device.graphs import BucketGraphs, GraphPlan, Places
from memsvc.device.kernels.accept import RESULT_EXTRA
from memsvc.device.lane import Lane
from memsvc.device.page_table import PageTables
from memsvc.device.slots import SlotWriter
from memsvc.device.table_mirror import TableMirror
from target_worker.cuda.network import TargetMemory
from target_worker.cuda.order import Chunk, Order
from target_worker.cuda.prompts import PromptStep
from target_worker.cuda.results import ResultBuffer
from target_worker.cuda.step_times import StepTimes
from target_worker.cuda.verify_step import SECTIONS, VerifyConfig, VerifyStep

_BUFFERS = 2
"""Steps whose results are not read yet: the one that runs, and the one behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What steps are put together from."""

    memory: TargetMemory
    tables: PageTables
    """The host's, with one row for each slot."""
    mirror: TableMirror
    verify: VerifyStep
    prompts: PromptStep
    lane: Lane


class StepWork:
    """Puts steps on a lane. Nothing here waits for the device."""

    def __init__(self, parts: Parts, config: VerifyConfig, plan: GraphPlan) -> None:
        """plan: the buckets of verify, made with `graph_plan`."""
        self._parts = parts
        self._config = config
        self._device = parts.memory.page_table.device
        self.writer = SlotWriter(parts.memory.slots)
        """Its changes are made at the beginning of the next step."""
        self._results: dict[int, torch.Tensor] = {}
        self._graphs = BucketGraphs(plan, parts.verify.turn_of(self._results_of), self._device)
        most = config.max_places * (config.block_size + 1 + 2 * RESULT_EXTRA)
        self._buffers = [ResultBuffer(most, self._device) for _ in range(_BUFFERS)]
        self._num_steps = 0
        self.times: StepTimes | None = None
        """Device times are taken with it; the plan must be split then."""

    def _results_of(self, places: Places) -> torch.Tensor:
        rows = torch.zeros(
            (places.size, RESULT_EXTRA + self._config.block_size), dtype=torch.int32, device=self._device
        )
        self._results[places.inputs.data_ptr()] = rows
        return rows

    def capture(self) -> tuple[float, int]:
        """Capture all buckets: seconds it took, and bytes of device memory."""
        self._graphs.capture()
        return self._graphs.capture_s, self._graphs.num_bytes

    def first_row(self, num_members: int) -> int:
        """Exchange row where the features of chunks begin beside so many blocks, whose rows stand before."""
        return self._graphs.bucket(num_members).places.size * self._config.block_size if num_members else 0

    @torch.inference_mode()
    def put(self, order: Order, hand_over: Callable[[], None]) -> ResultBuffer:
        """Enqueue a step, with the page tables as the host has them now. At most two steps may be unread.

        hand_over puts on the lane what the draft waits for: it comes before the host's copy of the results.
        Returns the tokens of each member, then of each chunk that ends its prompt.
        """
        results = self._buffers[self._num_steps % _BUFFERS]
        self._num_steps += 1
        parts = self._parts
        with parts.lane.running():
            parts.mirror.push(parts.lane.stage)
            self.writer.flush(parts.lane.stage)
            if order.clear:
                parts.memory.pool.zero_pages_at(parts.lane.stage(np.array(order.clear, dtype=np.int64)))
            rows = [self._blocks(order.members)] if order.members else []
            if order.chunks:
                rows += self._chunks(order.chunks, self.first_row(len(order.members)))
            hand_over()
            results.take(rows)
        return results

    def _blocks(self, members: Sequence[int]) -> torch.Tensor:
        bucket = self._graphs.bucket(len(members))
        places = bucket.places
        self._parts.lane.stage_into(places.inputs, places.host_inputs(members, []))
        if self.times is None:
            bucket.run()
        else:
            self.times.start(members)
            bucket.run(self.times.mark)
            self.times.end()
        return self._results[places.inputs.data_ptr()][: len(members)]

    def _chunks(self, chunks: Sequence[Chunk], first_row: int) -> list[torch.Tensor]:
        logits = self._parts.prompts.run(chunks, first_row)
        if logits is None:
            return []
        slots = [chunk.slot for chunk in chunks if chunk.is_last]
        members = self._parts.lane.stage(np.array(slots, dtype=np.int32))
        return [self._parts.verify.first_tokens(logits, members)]

    def mark(self) -> Callable[[], bool]:
        """Says from now on whether the lane has done all that is on it now."""
        if self._device.type != "cuda":
            return lambda: True
        event = torch.cuda.Event()
        with self._parts.lane.running():
            event.record()
        return event.query


def graph_plan(sizes: tuple[int, ...], *, is_split: bool, is_captured: bool) -> GraphPlan:
    """How verify is captured: is_split for device times of its sections."""
    return GraphPlan(sizes=sizes, sections=SECTIONS, is_split=is_split, is_captured=is_captured)
