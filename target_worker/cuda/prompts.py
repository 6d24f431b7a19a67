"""Prompt chunks, eagerly: any number of rows of any requests, whose tokens and places the host knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from memsvc.device.kernels.places import TokenRows
from memsvc.device.kernels.prefill_attention import PrefillPlan, prefill_attention
from memsvc.device.kv_pool import KvPool
from memsvc.device.lane import Lane
from memsvc.device.page_table import PageTables
from target_worker.attention import Span
from target_worker.cuda.network import AttendRows, Segment, TargetNetwork
from target_worker.cuda.order import Chunk
from target_worker.cuda.prompt_states import PromptStates


class PlanPrefill(Protocol):
    """Attention of prompt rows, made ready for one forward."""

    def __call__(self, spans: Sequence[Span]) -> AttendRows:
        """For the rows of spans, whose keys and values are in the pages when it is called."""
        ...


@dataclass(frozen=True, slots=True)
class TritonPrefill:
    """The kernel that needs nothing but Triton."""

    pool: KvPool
    page_table: torch.Tensor
    """int32 [num_slots + 1, max_pages], on the device."""
    group_size: int
    """Query heads of a key-value head."""

    def __call__(self, spans: Sequence[Span]) -> AttendRows:
        """See PlanPrefill."""
        return self.planned(PrefillPlan.of(spans, self.group_size, self.page_table.device))

    def planned(self, plan: PrefillPlan) -> AttendRows:
        """For the rows in the tiles of a plan; others come out as anything."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return prefill_attention(q, (self.pool.k(layer), self.pool.v(layer)), self.page_table, plan)

        return attend


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Chunks as rows of a batch, in order, on the host."""

    columns: np.ndarray
    """int64 [3, n]: token, position, and place of keys and values: page * page_size + offset."""
    spans: list[Span]
    """One a chunk."""
    wanted: list[int]
    """Rows whose logits are wanted: the last ones of prompts that end."""
    ending: list[int]
    """Slots of these prompts."""

    @property
    def num_rows(self) -> int:
        """n."""
        return self.columns.shape[1]


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Chunks on the device."""

    x: torch.Tensor
    """[n, hidden], embedded."""
    segment: Segment
    head: torch.Tensor
    """int64: exchange row of the first row's features, then the rows whose logits are wanted."""


class PromptStep:
    """Runs chunks through the network on the current stream; nothing is kept between calls."""

    def __init__(
        self,
        network: TargetNetwork,
        tables: PageTables,
        lane: Lane,
        plan_attention: PlanPrefill,
        states: PromptStates | None = None,
    ) -> None:
        """tables: the host's, with one row for each slot. states: needed by a hybrid target."""
        self.network = network
        self.lane = lane
        self._tables = tables
        self._plan_attention = plan_attention
        self._states = states

    def run(self, chunks: Sequence[Chunk], feature_row: int) -> torch.Tensor | None:
        """Logits [m, vocab] of the last rows of the m chunks that end a prompt, in order; None if there are none.

        K and V of every row go to the pages that the host's tables name now, features of row r to exchange row
        feature_row + r. Raises ValueError for a token outside the vocabulary.
        """
        batch = self.stage(chunks, feature_row, first_wanted=range(0), start=0)
        first_row, wanted = batch.head[:1], batch.head[1:]
        x = self.network.hidden(batch.x, [batch.segment], first_row, wanted)
        return self.network.model.head(x) if len(wanted) else None

    def stage(
        self, chunks: Sequence[Chunk], feature_row: int, *, first_wanted: Sequence[int], start: int
    ) -> PromptBatch:
        """Put chunks on the device whose rows are number `start` and on of a batch. first_wanted: of rows before."""
        rows = self.rows(chunks)
        # One copy for everything: the first row of features, the rows wanted, then the columns.
        head = np.array([feature_row, *first_wanted, *(start + row for row in rows.wanted)], dtype=np.int64)
        staged = self.lane.stage(np.concatenate((head, rows.columns.ravel())))
        token_ids, positions, slots = staged[len(head) :].view(3, -1)
        x = F.embedding(token_ids, self.network.model.embedding)
        attend = self._plan_attention(rows.spans)
        recur = self._states and self._states.plan(rows.spans)
        segment = Segment(TokenRows(positions=positions, slots=slots), attend, recur)
        return PromptBatch(x, segment, staged[: len(head)])

    def rows(self, chunks: Sequence[Chunk]) -> PromptRows:
        """Where they stand, by the tables as they are now. Raises ValueError for a token outside the vocabulary."""
        lens = [len(chunk.token_ids) for chunk in chunks]
        token_ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
        vocab = self.network.model.shape.vocab_size
        if token_ids.min() < 0 or token_ids.max() >= vocab:
            raise ValueError(f"token ids {token_ids.min()} to {token_ids.max()} in a vocabulary of {vocab}")
        owners = np.repeat([chunk.slot for chunk in chunks], lens)
        positions = np.concatenate(
            [np.arange(chunk.start, chunk.start + n) for chunk, n in zip(chunks, lens, strict=True)]
        )
        ends = np.cumsum(lens).tolist()
        placed = list(zip(chunks, lens, ends, strict=True))
        return PromptRows(
            columns=np.stack((token_ids, positions, self._tables.host_slots_at(owners, positions))),
            spans=[Span(chunk.slot, chunk.start, num, end - num, chunk.is_last) for chunk, num, end in placed],
            wanted=[end - 1 for chunk, _, end in placed if chunk.is_last],
            ending=[chunk.slot for chunk in chunks if chunk.is_last],
        )
