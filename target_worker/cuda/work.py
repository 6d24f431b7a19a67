"""The device's side of a step: what is enqueued for it on the lane, from slots, pages and tokens alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from memsvc.device.graphs import Bucket, BucketGraphs, GraphPlan, GraphPool, Places
from memsvc.device.kernels.accept import RESULT_EXTRA
from memsvc.device.lane import Lane
from memsvc.device.page_table import PageTables
from memsvc.device.slots import SlotWriter
from memsvc.device.table_mirror import TableMirror
from target_worker.cuda.network import TargetMemory
from target_worker.cuda.order import Chunk, Order
from target_worker.cuda.prompt_graphs import PromptGraphs
from target_worker.cuda.prompts import PromptStep
from target_worker.cuda.results import ResultBuffer
from target_worker.cuda.step_times import PROMPTS, StepTimes
from target_worker.cuda.verify_step import SECTIONS, VerifyConfig, VerifyStep

MIXED_ROWS = 512
"""Prompt rows from which on blocks are computed together with them: both are bound by the device then, and all weights
are read once. Fewer are a graph of their own, or take the host longer to enqueue than the device to compute, so that a
graph beside them costs less."""
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
    prompt_graphs: PromptGraphs | None = None
    """Of a dense target: what runs chunks of few rows instead."""


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
        # Blocks and prompts of a step run one after the other, so they share the memory of their graphs.
        pool = GraphPool.make(torch.cuda.Stream(self._device)) if self._device.type == "cuda" else None
        self._graphs.capture(pool)
        prompts = self._parts.prompt_graphs
        seconds, num_bytes = prompts.capture(pool) if prompts is not None else (0.0, 0)
        return self._graphs.capture_s + seconds, self._graphs.num_bytes + num_bytes

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
            self._push()
            self.writer.flush(parts.lane.stage)
            if order.clear:
                parts.memory.pool.zero_pages_at(parts.lane.stage(np.array(order.clear, dtype=np.int64)))
            with self._timed(order.members):
                rows = self._step(order)
            hand_over()
            results.take(rows)
        return results

    def _step(self, order: Order) -> list[torch.Tensor]:
        """Rows for the host: of the members, then of the chunks that end a prompt."""
        members, chunks = order.members, order.chunks
        if members and sum(len(chunk.token_ids) for chunk in chunks) >= MIXED_ROWS:
            return self._mixed(members, chunks)
        rows = [self._blocks(members)] if members else []
        return rows + self._prompts(chunks, self.first_row(len(members))) if chunks else rows

    def _prompts(self, chunks: Sequence[Chunk], feature_row: int) -> list[torch.Tensor]:
        graphs = self._parts.prompt_graphs
        rows = graphs.run(chunks, feature_row) if graphs is not None else None
        if rows is None:
            return self._first_tokens(chunks, self._parts.prompts.run(chunks, feature_row))
        return [rows] if len(rows) else []

    @torch.inference_mode()
    def catch_up(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Enqueue what brings the states of slots of a hybrid target to the last page edge of these lengths."""
        states = self._parts.memory.states
        assert states is not None, "a dense target has no states"
        with self._parts.lane.running():
            self._push()
            states.catch_up(slots, lengths, self._config.block_size, self._parts.lane.stage)

    def _push(self) -> None:
        parts = self._parts
        parts.mirror.push(parts.lane.stage)
        if parts.memory.states is not None:
            parts.memory.states.mirror.push(parts.lane.stage)

    def _blocks(self, members: Sequence[int]) -> torch.Tensor:
        bucket = self._choose(members)
        bucket.run(None if self.times is None else self.times.mark)
        return self._results[bucket.places.inputs.data_ptr()][: len(members)]

    def _choose(self, members: Sequence[int]) -> Bucket:
        """Their bucket, which knows them when the lane comes to it."""
        bucket = self._graphs.bucket(len(members))
        self._parts.lane.stage_into(bucket.places.inputs, bucket.places.host_inputs(members, []))
        return bucket

    def _mixed(self, members: Sequence[int], chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """One forward for both."""
        places = self._choose(members).places
        num_rows = places.size * self._config.block_size
        batch = self._parts.prompts.stage(chunks, 0, first_wanted=range(num_rows), start=num_rows)
        results = self._results[places.inputs.data_ptr()]
        logits = self._parts.verify.run_with_prompts(places, results, batch)
        return [results[: len(members)], *self._first_tokens(chunks, logits)]

    def _first_tokens(self, chunks: Sequence[Chunk], logits: torch.Tensor | None) -> list[torch.Tensor]:
        slots = [chunk.slot for chunk in chunks if chunk.is_last]
        if logits is None or not slots:
            return []
        members = self._parts.lane.stage(np.array(slots, dtype=np.int32))
        return [self._parts.verify.first_tokens(logits, members)]

    @contextmanager
    def _timed(self, members: Sequence[int]) -> Iterator[None]:
        """What is put on the lane inside is one step of the trace; what comes after the blocks in it are prompts."""
        if self.times is None:
            yield
            return
        self.times.start(members)
        yield
        self.times.mark(PROMPTS)
        self.times.end()

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
