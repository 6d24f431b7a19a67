"""The three ways to run a step on a CUDA device. paged is the product, captured; the others show what it saves.

They must give the same tokens: all of them use the same kernels, and differ in who is attended with whom.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from draft_worker.attention import Attend, DraftKv
from draft_worker.batch import BlockBatch
from draft_worker.cuda.network import SECTIONS, DraftMemory, DraftStep
from draft_worker.materialized import MaterializedAttention
from draft_worker.shape import DraftShape
from memsvc.device.graphs import BucketGraphs, GraphPlan, OnSection, Places, Turn
from memsvc.device.lane import Lane
from memsvc.device.page_table import PageTables

NUM_NUMBERS = 1
"""Beside the members: how many drafts shall count."""


class Route(Protocol):
    """Puts steps on the current stream."""

    def run(self, members: Sequence[int], num_drafts: int, on_section: OnSection | None = None) -> None:
        """Features of the members' newest rows into draft KV, then num_drafts > 0 drafts of each into its slot."""
        ...


class PagedRoute:
    """One replay of the bucket's graph; without graphs, or past the largest bucket, the same kernels one by one."""

    def __init__(self, step: DraftStep, lane: Lane, graphs: BucketGraphs) -> None:
        self._step = step
        self._lane = lane
        self._graphs = graphs

    @classmethod
    def make(cls, step: DraftStep, lane: Lane, plan: GraphPlan, device: torch.device | str) -> "PagedRoute":
        """The route with its graphs captured."""
        graphs = BucketGraphs(plan, turns_of(step), device)
        graphs.capture()
        return cls(step, lane, graphs)

    def run(self, members: Sequence[int], num_drafts: int, on_section: OnSection | None = None) -> None:
        """See Route. The host sends the members in one small copy and waits for nothing."""
        bucket = self._graphs.bucket(len(members))
        self._lane.stage_into(bucket.places.inputs, bucket.places.host_inputs(members, [num_drafts]))
        bucket.run(on_section)


class PerRequestRoute:
    """One request after the other: weights and head are read once for each."""

    def __init__(self, step: DraftStep, lane: Lane, device: torch.device | str) -> None:
        self._lane = lane
        plan = GraphPlan(sizes=(1,), sections=SECTIONS, num_numbers=NUM_NUMBERS, is_captured=False)
        self._bucket = BucketGraphs(plan, turns_of(step), device).bucket(1)

    def run(self, members: Sequence[int], num_drafts: int, on_section: OnSection | None = None) -> None:
        """See Route."""
        places = self._bucket.places
        for member in members:
            self._lane.stage_into(places.inputs, places.host_inputs([member], [num_drafts]))
            self._bucket.run(on_section)


class MaterializedRoute:
    """Whole contexts gathered, and every row of them attended. Its sizes are data, so the host waits for them."""

    def __init__(
        self, step: DraftStep, lane: Lane, shape: DraftShape, memory: DraftMemory, tables: PageTables, num_drafts: int
    ) -> None:
        """tables: the host's, with one row for each slot; num_drafts: of the step's blocks."""
        self._step = step
        self._lane = lane
        self._shape = shape
        self._memory = memory
        self._tables = tables
        self._num_drafts = num_drafts

    def run(self, members: Sequence[int], num_drafts: int, on_section: OnSection | None = None) -> None:
        """See Route."""
        places = Places.make(len(members), NUM_NUMBERS, self._memory.features.device)
        self._lane.stage_into(places.inputs, places.host_inputs(members, [num_drafts]))
        for name in self._step.run(places, lambda _: self._attend(members)):
            if on_section is not None:
                on_section(name)

    def _attend(self, members: Sequence[int]) -> Attend:
        slots, rows = self._memory.slots, np.array(members, dtype=np.int64)
        anchors, ends, starts = (
            column.cpu().numpy()[rows].astype(np.int64) for column in (slots.anchor, slots.length, slots.valid_from)
        )
        batch = BlockBatch(
            rows=rows, anchors=anchors, anchor_pos=ends, context_start=starts, num_drafts=self._num_drafts
        )
        return MaterializedAttention(self._shape, DraftKv(self._memory.pool, self._tables, self._step.dtype), batch)


def turns_of(step: DraftStep) -> Callable[[Places], Turn]:
    """make_turn for BucketGraphs."""

    def make_turn(places: Places) -> Turn:
        return lambda: step.run(places)

    return make_turn
