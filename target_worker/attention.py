"""Reference paged attention in torch: causal, grouped query heads, any mix of blocks and prompt chunks."""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from memsvc.device.kv_pool import KvPool
from memsvc.device.page_table import PageTables

TILE_ROWS = 256
"""A prompt chunk is attended in tiles of so many rows; each sees no further than its own end."""
_PAD_FACTOR = 1.25
_PAD_PAGES = 2


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [first, first + num) of the batch are tokens [start, start + num) of page-table row table_row."""

    table_row: int
    start: int
    num: int
    first: int

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
    pages: torch.Tensor
    """int64 [n, num_pages]"""
    mask: torch.Tensor
    """Added to the scores: [n, 1, group_size * num, num_pages * page_size], 0 or -inf."""
    gathered: torch.Tensor
    """Scratch for one layer's keys and values, [2, n, num_pages * page_size, kv_heads, head_dim]."""
    unseen: torch.Tensor
    """Its rows past each span's end, counted over all: they may hold NaN, which no mask stops (0 * NaN)."""


class PagedAttention:
    """One forward's attention: planned once from its spans, then run in every layer."""

    def __init__(self, pool: KvPool, tables: PageTables, spans: list[Span], num_heads: int) -> None:
        self._pool = pool
        self._tables = tables
        self._group_size = num_heads // pool.shape.num_kv_heads
        self._groups = [self._plan(group) for group in group_spans(spans, pool.page_size)]

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [rows, heads, d] against the pool, where this forward's k and v already are: [rows, heads * d]."""
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        for group in self._groups:
            out[group.rows] = self._attend(layer, group, q[group.rows])
        return out

    def _attend(self, layer: int, group: _Group, q: torch.Tensor) -> torch.Tensor:
        n, kv_heads, head_dim = len(group.pages), self._pool.shape.num_kv_heads, self._pool.shape.head_dim
        keys, values = self._pool.gather(layer, group.pages, out=(group.gathered[0], group.gathered[1]))
        group.gathered.view(-1, kv_heads * head_dim).index_fill_(0, group.unseen, 0)
        # The query heads of a key-value head become more rows of it, so keys need no repeating.
        q = q.view(n, -1, kv_heads, self._group_size, head_dim).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            q.reshape(n, kv_heads, -1, head_dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=group.mask,
        )
        out = out.view(n, kv_heads, self._group_size, -1, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(-1, kv_heads * self._group_size * head_dim)

    def _plan(self, spans: list[Span]) -> _Group:
        pool, device = self._pool, self._tables.device
        num = spans[0].num
        num_pages = max(-(-span.end // pool.page_size) for span in spans)
        length = num_pages * pool.page_size
        starts = torch.tensor([span.start for span in spans], device=device)
        keys_at = torch.arange(length, device=device)
        sees = keys_at <= starts[:, None, None] + torch.arange(num, device=device)[:, None]
        mask = torch.zeros(sees.shape, dtype=pool.shape.dtype, device=device).masked_fill_(~sees, -torch.inf)
        mask = mask[:, None].expand(-1, self._group_size, -1, -1).reshape(len(spans), 1, -1, length)
        unseen = (keys_at >= (starts + num)[:, None]).expand(2, -1, -1).flatten().nonzero()[:, 0]
        form = (2, len(spans), length, pool.shape.num_kv_heads, pool.shape.head_dim)
        return _Group(
            rows=_rows_of(spans, device),
            pages=self._tables.pages([span.table_row for span in spans], num_pages),
            mask=mask,
            gathered=torch.empty(form, dtype=pool.shape.dtype, device=device),
            unseen=unseen,
        )


def _rows_of(spans: list[Span], device: torch.device) -> torch.Tensor | slice:
    num = spans[0].num
    if all(b.first == a.first + num for a, b in pairwise(spans)):
        return slice(spans[0].first, spans[-1].first + num)
    firsts = torch.tensor([span.first for span in spans], device=device)
    return (firsts[:, None] + torch.arange(num, device=device)).flatten()


def group_spans(spans: list[Span], page_size: int) -> list[list[Span]]:
    """Spans, cut into tiles, in groups of equal row counts whose longest is little longer than the shortest."""
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
    return groups
