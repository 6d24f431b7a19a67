"""Reference paged attention in torch: causal, grouped query heads, any mix of blocks and prompt chunks."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from memsvc.device.cpu.attention import KernelPlan, Rows, takes
from memsvc.device.cpu.kernels import kernels_for
from memsvc.device.kv_pool import KvPool, zero_rows
from memsvc.device.page_table import PageTables

TILE_ROWS = 256
"""A prompt chunk is attended in tiles of so many rows; each sees no further than its own end."""
SCRATCH_BYTES = 1 << 20
"""Keys and values of one layer gathered at a time, at most, unless one request has more: they stay in the cache."""
KERNEL_ROWS = 32
"""Spans of at most so many rows go to the compiled kernel, where there is one: longer ones torch does as fast."""
_PAD_FACTOR = 1.25
_PAD_PAGES = 2


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [first, first + num) of the batch are tokens [start, start + num) of page-table row table_row."""

    table_row: int
    start: int
    num: int
    first: int
    is_last: bool = False
    """They are the last ones of a prompt."""

    @property
    def end(self) -> int:
        """Tokens its last row sees."""
        return self.start + self.num

    def tiles(self) -> list["Span"]:
        """Pieces of at most TILE_ROWS rows."""
        return [
            Span(self.table_row, self.start + i, min(TILE_ROWS, self.num - i), self.first + i)
            for i in range(0, self.num, TILE_ROWS)
        ]


@dataclass(frozen=True, slots=True)
class _Group:
    """n spans of equally many rows and similar length, attended as one padded batch."""

    rows: torch.Tensor | slice
    """Where the n * num rows lie in the batch."""
    places: torch.Tensor
    """KvPool.places of num_pages pages a span."""
    mask: torch.Tensor
    """Added to the scores: [n, 1, group_size * num, num_pages * page_size], 0 or -inf."""
    gathered: torch.Tensor
    """Scratch for one layer's keys and values, [2, n, num_pages * page_size, kv_heads, head_dim]."""
    unseen: torch.Tensor
    """Its rows past each span's end, counted over all: they may hold NaN, which no mask stops (0 * NaN)."""
    keys: torch.Tensor
    values: torch.Tensor
    """The two parts of gathered, heads first."""


class PagedAttention:
    """One forward's attention: planned once from its spans, then run in every layer."""

    def __init__(self, pool: KvPool, tables: PageTables, spans: list[Span], num_heads: int, dtype: torch.dtype) -> None:
        """dtype: of q. Pages may be e4m3 instead."""
        self._pool = pool
        self._tables = tables
        self._dtype = dtype
        self._group_size = num_heads // pool.shape.num_kv_heads
        self._kernels = kernels_for(pool.k(0)) if takes(pool) else None
        few = [span for span in spans if span.num <= KERNEL_ROWS] if self._kernels else []
        self._few = KernelPlan(pool, tables, _kernel_rows(few), num_heads) if few else None
        self._groups = self._plan_groups([span for span in spans if span.num > KERNEL_ROWS or not few])

    def _plan_groups(self, spans: list[Span]) -> list[_Group]:
        if not spans:
            return []
        pool, shape, tables = self._pool, self._pool.shape, self._tables
        page_numbers = 2 * pool.page_size * shape.num_kv_heads * shape.head_dim
        parts = group_spans(spans, pool.page_size, SCRATCH_BYTES // (page_numbers * self._dtype.itemsize))
        # All groups use the same scratch, one after another.
        most_pages = max(len(part) * _num_pages(part, pool.page_size) for part in parts)
        scratch = torch.empty(page_numbers * most_pages, dtype=self._dtype, device=tables.device)
        return [self._plan(part, scratch) for part in parts]

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [rows, heads, d] against the pool, where this forward's k and v already are: [rows, heads * d]."""
        if self._few is None and len(self._groups) == 1 and isinstance(self._groups[0].rows, slice):
            return self._attend(layer, self._groups[0], q)
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        if self._few is not None and self._kernels is not None:
            self._kernels.attend(self._few.at(layer, q, out.view(q.shape)))
        for group in self._groups:
            out[group.rows] = self._attend(layer, group, q[group.rows])
        return out

    def _attend(self, layer: int, group: _Group, q: torch.Tensor) -> torch.Tensor:
        n, kv_heads, _, head_dim = group.keys.shape
        self._pool.gather_wide(layer, group.places, group.gathered)
        zero_rows(group.gathered, group.unseen)
        # The query heads of a key-value head become more rows of it, so keys need no repeating.
        q = q.view(n, -1, kv_heads, self._group_size, head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(n, kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(q, group.keys, group.values, attn_mask=group.mask)
        out = out.view(n, kv_heads, self._group_size, -1, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(-1, kv_heads * self._group_size * head_dim)

    def _plan(self, spans: list[Span], scratch: torch.Tensor) -> _Group:
        pool, device = self._pool, self._tables.device
        num, num_pages = spans[0].num, _num_pages(spans, pool.page_size)
        length = num_pages * pool.page_size
        starts = torch.tensor([span.start for span in spans], device=device)
        keys_at = torch.arange(length, device=device)
        sees = keys_at <= starts[:, None, None] + torch.arange(num, device=device)[:, None]
        mask = torch.zeros(sees.shape, dtype=self._dtype, device=device).masked_fill_(~sees, -torch.inf)
        mask = mask[:, None].expand(-1, self._group_size, -1, -1).reshape(len(spans), 1, -1, length)
        unseen = (keys_at >= (starts + num)[:, None]).expand(2, -1, -1).flatten().nonzero()[:, 0]
        form = (2, len(spans), length, pool.shape.num_kv_heads, pool.shape.head_dim)
        gathered = scratch[: math.prod(form)].view(form)
        return _Group(
            rows=_rows_of(spans, device),
            places=pool.places(self._tables.pages([span.table_row for span in spans], num_pages)),
            mask=mask,
            gathered=gathered,
            unseen=unseen,
            keys=gathered[0].transpose(1, 2),
            values=gathered[1].transpose(1, 2),
        )


def _kernel_rows(spans: list[Span]) -> Rows:
    columns = np.array([(span.table_row, span.first, span.num, 0, span.start) for span in spans], dtype=np.int64).T
    return Rows(table_rows=columns[0], firsts=columns[1], nums=columns[2], lows=columns[3], positions=columns[4])


def _num_pages(spans: list[Span], page_size: int) -> int:
    """Pages of the longest."""
    return -(-max(span.end for span in spans) // page_size)


def _rows_of(spans: list[Span], device: torch.device) -> torch.Tensor | slice:
    num = spans[0].num
    if all(b.first == a.first + num for a, b in pairwise(spans)):
        return slice(spans[0].first, spans[-1].first + num)
    firsts = torch.tensor([span.first for span in spans], device=device)
    return (firsts[:, None] + torch.arange(num, device=device)).flatten()


def group_spans(spans: list[Span], page_size: int, max_pages: int) -> list[list[Span]]:
    """Spans, cut into tiles, in groups of equal row counts whose longest is little longer than the shortest.

    A group of several has at most max_pages pages, padding included.
    """
    tiles = sorted((tile for span in spans for tile in span.tiles()), key=lambda tile: (tile.num, tile.end))
    groups: list[list[Span]] = []
    for tile in tiles:
        group = groups[-1] if groups else []
        pages, shortest = -(-tile.end // page_size), -(-group[0].end // page_size) if group else 0
        # Long tiles are worth a call of their own; short ones share it, padded by a quarter at most.
        fits = group and tile.num == group[0].num and tile.num * 4 <= TILE_ROWS
        if fits and pages <= shortest * _PAD_FACTOR + _PAD_PAGES:
            group.append(tile)
        else:
            groups.append([tile])
    return [part for group in groups for part in _in_parts(group, page_size, max_pages)]


def _in_parts(group: list[Span], page_size: int, max_pages: int) -> list[list[Span]]:
    """The group in the order of the batch, where rows lie next to each other, cut into pieces of equal size."""
    group = sorted(group, key=lambda span: span.first)
    most = max(1, max_pages // _num_pages(group, page_size))
    num_parts = -(-len(group) // most)
    size = -(-len(group) // num_parts)
    return [group[i : i + size] for i in range(0, len(group), size)]
