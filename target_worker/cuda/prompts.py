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
from target_worker.cuda.network import AttendRows, TargetNetwork
from target_worker.cuda.order import Chunk


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
        plan = PrefillPlan.of(spans, self.group_size, self.page_table.device)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return prefill_attention(q, (self.pool.k(layer), self.pool.v(layer)), self.page_table, plan)

        return attend


class PromptStep:
    """Runs chunks through the network on the current stream; nothing is kept between calls."""

    def __init__(self, network: TargetNetwork, tables: PageTables, lane: Lane, plan_attention: PlanPrefill) -> None:
        """tables: the host's, with one row for each slot."""
        self._network = network
        self._tables = tables
        self._lane = lane
        self._plan_attention = plan_attention

    def run(self, chunks: Sequence[Chunk], feature_row: int) -> torch.Tensor | None:
        """Logits [m, vocab] of the last rows of the m chunks that end a prompt, in order; None if there are none.

        K and V of every row go to the pages that the host's tables name now, features of row r to exchange row
        feature_row + r. Raises ValueError for a token outside the vocabulary.
        """
        lens = [len(chunk.token_ids) for chunk in chunks]
        token_ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
        vocab = self._network.model.shape.vocab_size
        if token_ids.min() < 0 or token_ids.max() >= vocab:
            raise ValueError(f"token ids {token_ids.min()} to {token_ids.max()} in a vocabulary of {vocab}")
        rows = np.repeat([chunk.slot for chunk in chunks], lens)
        positions = np.concatenate(
            [np.arange(chunk.start, chunk.start + n) for chunk, n in zip(chunks, lens, strict=True)]
        )
        places = self._slots(rows, positions)
        ends = np.cumsum(lens)
        wanted = [int(end) - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.is_last]
        # One copy for everything: the first rows of features, the rows wanted, then three columns of the rows.
        head = np.array([feature_row, *wanted], dtype=np.int64)
        staged = self._lane.stage(np.concatenate((head, token_ids, positions, places)))
        own = staged[len(head) :].view(3, -1)
        x = self._hidden(own, self._spans(chunks, ends), staged[:1])
        return self._network.model.head(x.index_select(0, staged[1 : len(head)])) if wanted else None

    def _hidden(self, columns: torch.Tensor, spans: list[Span], first_row: torch.Tensor) -> torch.Tensor:
        token_ids, positions, places = columns
        x = F.embedding(token_ids, self._network.model.embedding)
        rows = TokenRows(positions=positions, slots=places)
        return self._network.hidden(x, rows, self._plan_attention(spans), first_row)

    def _slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        page_size = self._tables.page_size
        pages = self._tables.table.numpy()[rows, positions // page_size].astype(np.int64)
        return pages * page_size + positions % page_size

    @staticmethod
    def _spans(chunks: Sequence[Chunk], ends: np.ndarray) -> list[Span]:
        return [
            Span(chunk.slot, chunk.start, len(chunk.token_ids), int(end) - len(chunk.token_ids))
            for chunk, end in zip(chunks, ends, strict=True)
        ]
