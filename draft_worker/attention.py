"""Block attention over paged context: the block's own K and V stay local, the context's come by page table."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from draft_worker.batch import BlockBatch
from draft_worker.shape import DraftShape, LayerAttention
from memsvc.device.cpu.attention import KernelPlan, Rows, takes
from memsvc.device.cpu.kernels import kernels_for
from memsvc.device.kv_pool import KvPool, zero_rows
from memsvc.device.page_table import PageTables

FEW_PAGES = 4
"""Gathering this many pages in vain costs less than another call of the kernel."""

SIMILAR = 2 / 3
"""A request shares a call with one whose context is this share of its own, or more."""


@dataclass(frozen=True, slots=True)
class DraftKv:
    """What blocks attend beside themselves."""

    pool: KvPool
    tables: PageTables
    dtype: torch.dtype
    """Of blocks' rows; pages may be e4m3."""


class Attend(Protocol):
    """Attention of a whole batch in one layer."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> torch.Tensor:
        """Output [n, B, heads, d] for q [n, B, heads, d] and the block's own k, v [n, B, kv_heads, d].

        sink [heads]: a logit per head that takes weight to nothing, or None.
        """
        ...


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Requests of one batch with contexts of similar length, attended as one padded batch.

    Shapes: m requests, S places: p pages of context, then the block's B rows in pages of their own.
    """

    members: torch.Tensor | None
    """int64 [m]: places in the batch; None if it is the whole batch in order."""
    places: torch.Tensor
    """Pool.places of S / page_size pages a request; the dummy page past its context, where the block comes to lie."""
    block_at: int
    """Place of the block's first row."""
    unused: torch.Tensor
    """int64: places of [2 * m * S] that no row may see. Their bytes may be anything, NaN too."""
    mask: torch.Tensor
    """Added to the logits, [m, 1, B * heads per kv head, S]: 0 or -inf. One row if all rows see the same."""
    gathered: torch.Tensor
    """[2 (K, V), m, S, kv_heads, d]: scratch for one layer at a time."""


def block_sees(attention: LayerAttention, block_size: int) -> np.ndarray:
    """bool [B, B]: row i of a block sees row m of it."""
    distance = np.arange(block_size)[:, None] - np.arange(block_size)
    seen = distance >= 0 if attention.causal else np.ones_like(distance, dtype=bool)
    if attention.window:
        seen = seen & (np.abs(distance) < attention.window)
    return seen


def similar_lengths(num_pages: np.ndarray) -> list[np.ndarray]:
    """Places of num_pages [n] in sets: the shortest of a set has most of the longest's pages, or few less."""
    sets = []
    left = np.arange(len(num_pages))
    while len(left):
        longest = num_pages[left].max()
        near = num_pages[left] >= min(longest * SIMILAR, longest - FEW_PAGES)
        sets.append(left[near])
        left = left[~near]
    return sets


class ContextPlan:
    """Which pages a batch gathers and what each row sees, for all layers with one kind of attention."""

    def __init__(self, shape: DraftShape, attention: LayerAttention, batch: BlockBatch, memory: DraftKv) -> None:
        self._group_size = shape.num_heads // shape.num_kv_heads
        self._attention = attention
        self._batch = batch
        self._tables = tables = memory.tables
        self._pool = memory.pool
        self._dtype = memory.dtype
        end = batch.anchor_pos
        start = batch.context_start
        if attention.window:
            # Row 0 sees furthest back.
            start = np.maximum(start, end - attention.window + 1)
        self._start = np.minimum(start, end)
        self._first = self._start // tables.page_size
        self._num_pages = np.where(self._start < end, -(-end // tables.page_size) - self._first, 0)
        self.groups = [self._group(members) for members in similar_lengths(self._num_pages)]

    def _group(self, members: np.ndarray) -> ContextGroup:
        page_size, shape = self._tables.page_size, self._pool.shape
        first, num_pages = self._first[members, None], self._num_pages[members, None]
        block_at = int(num_pages.max()) * page_size
        steps = np.arange(num_pages.max() - (-self._batch.block_size // page_size))
        columns = np.minimum(first + steps, self._tables.max_pages - 1)
        pages = self._tables.table.numpy()[self._batch.rows[members, None], columns].astype(np.int64)
        positions = first * page_size + np.arange(len(steps) * page_size)
        used = (positions >= self._start[members, None]) & (positions < self._batch.anchor_pos[members, None])
        mask = self._mask(members, positions[:, :block_at], used)
        used[:, block_at : block_at + self._batch.block_size] = True
        device = self._tables.device
        form = (2, *used.shape, shape.num_kv_heads, shape.head_dim)
        return ContextGroup(
            members=None if len(members) == len(self._batch) else torch.from_numpy(members).to(device),
            places=self._pool.places(torch.from_numpy(pages * (steps < num_pages)).to(device)),
            block_at=block_at,
            unused=torch.from_numpy(np.flatnonzero(np.stack((~used, ~used)))).to(device),
            mask=mask.to(device),
            gathered=torch.empty(form, dtype=self._dtype, device=device),
        )

    def _mask(self, members: np.ndarray, positions: np.ndarray, used: np.ndarray) -> torch.Tensor:
        """positions [m, block_at] of the context's places; used [m, S]."""
        block_size, window = self._batch.block_size, self._attention.window
        block_at = positions.shape[1]
        inside = block_sees(self._attention, block_size)
        rows = self._batch.positions[members]
        edged = bool(window) and bool((rows[:, -1] - self._start[members] >= window).any())
        num_rows = 1 if inside.all() and not edged else block_size
        seen = np.repeat(used[:, None], num_rows, axis=1)
        if edged:
            seen[:, :, :block_at] &= rows[:, :, None] - positions[:, None] < window
        seen[:, :, block_at : block_at + block_size] = inside[:num_rows]
        mask = torch.zeros(seen.shape, dtype=self._dtype)
        mask.masked_fill_(torch.from_numpy(~seen), -torch.inf)
        if num_rows > 1:
            mask = mask.repeat_interleave(self._group_size, dim=1)
        return mask[:, None]


def kernel_plan(shape: DraftShape, attention: LayerAttention, batch: BlockBatch, memory: DraftKv) -> KernelPlan:
    """What ContextPlan says, for the compiled kernel: it needs no padding, no mask and no copies."""
    n, block_size = len(batch), batch.block_size
    rows = Rows(
        table_rows=batch.rows,
        firsts=np.arange(n) * block_size,
        nums=np.full(n, block_size),
        lows=np.minimum(batch.context_start, batch.anchor_pos),
        positions=batch.anchor_pos,
    )
    causal, window = attention.causal, attention.window or 0
    return KernelPlan(memory.pool, memory.tables, rows, shape.num_heads, causal=causal, window=window)


class PagedAttention:
    """The product's route: every block row of every request, one gather and one kernel per length group."""

    def __init__(self, shape: DraftShape, memory: DraftKv, batch: BlockBatch) -> None:
        self._pool = pool = memory.pool
        self._kernels = kernels_for(pool.k(0)) if takes(pool) else None
        kinds = set(shape.layers)
        if self._kernels:
            compiled = {kind: kernel_plan(shape, kind, batch, memory) for kind in kinds}
            self._compiled = [compiled[kind] for kind in shape.layers]
        else:
            plans = {kind: ContextPlan(shape, kind, batch, memory) for kind in kinds}
            self._plans = [plans[kind] for kind in shape.layers]

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> torch.Tensor:
        """See Attend."""
        if self._kernels:
            plan, out = self._compiled[layer], torch.empty(q.shape, dtype=q.dtype)
            self._kernels.attend(plan.with_own(plan.at(layer, q, out), k, v, sink))
            return out
        groups = self._plans[layer].groups
        if len(groups) == 1:
            return self._attend(layer, groups[0], (q, k, v), sink)
        out = torch.empty_like(q)
        for group in groups:
            at = group.members
            out[at] = self._attend(layer, group, (q[at], k[at], v[at]), sink)
        return out

    def _attend(
        self,
        layer: int,
        group: ContextGroup,
        block: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        q, k, v = block
        keys, values = gathered = group.gathered
        self._pool.gather_wide(layer, group.places, gathered)
        # A masked key's logit is -inf whatever the key, but NaN plus -inf is NaN, and so is 0 * NaN.
        zero_rows(gathered, group.unused)
        for context, own in ((keys, k), (values, v)):
            context[:, group.block_at : group.block_at + own.shape[1]] = own
        return attend_block(q, keys, values, group.mask, sink)


def attend_block(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor | None
) -> torch.Tensor:
    """Attention [n, B, heads, d] of q over keys and values [n, S, kv_heads, d].

    The query heads of a kv head are extra rows of it, so K and V are read once, not once per head:
    mask is [n, 1, B * heads per kv head, S], or has one row for all.
    """
    n, num_rows, num_heads, dim = q.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    if sink is not None:
        keys, values, mask = with_sink(keys, values, mask, sink.view(num_kv_heads, group).repeat(1, num_rows))
    rows = q.view(n, num_rows, num_kv_heads, group, dim).permute(0, 2, 1, 3, 4).reshape(n, num_kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask)
    return out.view(n, num_kv_heads, num_rows, group, dim).permute(0, 2, 1, 3, 4).reshape(n, num_rows, num_heads, dim)


def with_sink(
    keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with one more key: zero, worth nothing, and sink [kv_heads, rows] is its logit."""
    nothing = torch.zeros_like(keys[:, :1])
    wide = mask.expand(-1, *sink.shape, -1)
    column = sink.to(mask.dtype)[None, :, :, None].expand(len(mask), -1, -1, 1)
    return torch.cat([keys, nothing], dim=1), torch.cat([values, nothing], dim=1), torch.cat([wide, column], dim=3)
