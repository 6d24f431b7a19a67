"""Drafts for all requests at once: one forward over n x B rows, the head on rows 1..k, and the token choice."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draft_worker.attention import Attend, DraftKv, PagedAttention
from draft_worker.batch import BlockBatch
from draft_worker.candidates import CandidateFinder
from draft_worker.choice import CoupledChoice, first_best, is_plain_argmax, walk
from draft_worker.materialized import MaterializedAttention
from draft_worker.model import DraftModel
from memsvc.device.kv_pool import KvPool
from memsvc.device.page_table import PageTables
from memsvc.device.row_sampler import RowSampler

UNARY_TOP_K = 16
"""Candidates of a row of a drafter without a selector, when its tokens are sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafts:
    """What one propose made, and the host time it took."""

    token_ids: np.ndarray
    """int64 [n, k]"""
    fwd_us: float = 0.0
    """Embedding and layers."""
    head_us: float = 0.0
    """Output head."""
    select_us: float = 0.0
    """Candidates and the walk over them."""


class Proposer:
    """Drafts by one of the routes of config.ROUTES. All of them give the same tokens."""

    def __init__(
        self, model: DraftModel, pool: KvPool, tables: PageTables, route: str, buckets: Sequence[int] = ()
    ) -> None:
        """buckets: request counts to which a batch is padded with dummy requests; none = no padding."""
        shape = model.shape
        self._model = model
        self._memory = DraftKv(pool, tables, model.dtype)
        self._loops = route == "per_request"
        self._buckets = sorted(buckets)
        self._attention = MaterializedAttention if route == "materialized" else PagedAttention
        self._finder = CandidateFinder(shape.output_multiplier, shape.final_logit_softcapping)

    @torch.inference_mode()
    def propose(self, batch: BlockBatch, samplers: Sequence[RowSampler]) -> Drafts:
        """k tokens for each block; samplers [n] stand after the anchors and are not changed."""
        if not len(batch) or not batch.num_drafts:
            return Drafts(token_ids=np.zeros((len(batch), batch.num_drafts), dtype=np.int64))
        if not self._loops:
            return self._forward(batch, samplers)
        parts = [self._forward(batch.one(index), [sampler]) for index, sampler in enumerate(samplers)]
        return Drafts(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            fwd_us=sum(part.fwd_us for part in parts),
            head_us=sum(part.head_us for part in parts),
            select_us=sum(part.select_us for part in parts),
        )

    def _forward(self, batch: BlockBatch, samplers: Sequence[RowSampler]) -> Drafts:
        clock = _Clock()
        z = self._rows(batch)
        fwd_us = clock.lap()
        logits = self._model.logits(z.flatten(0, 1))
        head_us = clock.lap()
        token_ids = self._choose(batch, samplers, z, logits)
        return Drafts(token_ids=token_ids, fwd_us=fwd_us, head_us=head_us, select_us=clock.lap())

    def _rows(self, batch: BlockBatch) -> torch.Tensor:
        """Final-normed rows 1..k of every block: [n, k, H]."""
        padded = batch.padded(self._bucket(len(batch)))
        attend: Attend = self._attention(self._model.shape, self._memory, padded)
        device = self._memory.tables.device
        anchors, positions = (torch.from_numpy(part).to(device) for part in (padded.anchors, padded.positions))
        return self._model.rows(anchors, positions, attend)[: len(batch), 1:]

    def _bucket(self, num_reqs: int) -> int:
        return next((bucket for bucket in self._buckets if bucket >= num_reqs), num_reqs)

    def _choose(
        self, batch: BlockBatch, samplers: Sequence[RowSampler], z: torch.Tensor, logits: torch.Tensor
    ) -> np.ndarray:
        model = self._model
        plain = all(is_plain_argmax(sampler) for sampler in samplers)
        if model.selector is not None:
            top_k = model.shape.selector_top_k
        else:
            top_k = 1 if plain else min(UNARY_TOP_K, len(logits))
        unary, head_rows = (part.view(*z.shape[:2], top_k) for part in self._finder.top(logits, top_k))
        ids = model.token_ids(head_rows)
        if model.selector is None:
            lattice = unary[:, :, None]
        else:
            anchors = torch.from_numpy(batch.anchors).to(ids.device)
            lattice = model.selector.lattice(z, anchors, unary, ids)
        host_ids = ids.cpu().numpy()
        pick = first_best if plain else CoupledChoice(samplers, host_ids)
        return walk(lattice.cpu().numpy(), host_ids, pick)


class _Clock:
    """Host microseconds between laps."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        spent, self._at = (now - self._at) * 1e6, now
        return spent
