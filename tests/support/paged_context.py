"""Contexts in shuffled pages among NaN, and dense attention over them in float64."""

from dataclasses import dataclass

import torch

from memsvc.device.kernels.block_attention import Context

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes -> integers of that size."""


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Keys and values of some requests, dense and in pages. Everything that may not be read is NaN."""

    keys: list[torch.Tensor]
    """One [length, kv_heads, d] a place, NaN before its start."""
    values: list[torch.Tensor]
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    starts: list[int]
    context: Context


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Sizes of one attention layer."""

    num_kv_heads: int = 2
    group: int = 2
    dim: int = 16
    page: int = 4

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group


def paged_context(
    heads: Heads,
    lengths: list[int],
    *,
    starts: list[int] | None = None,
    dtype: torch.dtype,
    device: str,
    growth: float = 0.0,
    kv_dtype: torch.dtype | None = None,
) -> PagedContext:
    """A place for each length, in slots that are not in order; length 0 is the dummy slot 0.

    growth: how much larger the last keys are than the first, so that the highest score comes late. kv_dtype: of pages,
    if it is not dtype: the dense keys and values are then what those hold, by torch.
    """
    kept = kv_dtype or dtype
    starts = starts or [0] * len(lengths)
    num_slots = len(lengths) + 2
    per_slot = [-(-length // heads.page) for length in lengths]
    num_pages = sum(per_slot) + 3
    pages = (torch.randperm(num_pages - 1) + 1).tolist()
    # Pages with keys and values inside, and other bytes between them.
    form = (num_pages, 3, heads.page, heads.num_kv_heads, heads.dim)
    arena = torch.full(form, torch.nan, dtype=torch.float32, device=device).to(kept)
    table = torch.zeros((num_slots, max(per_slot) + 2), dtype=torch.int32)
    slots = (torch.randperm(num_slots - 1) + 1)[: len(lengths)]
    length_of, start_of = torch.zeros(num_slots, dtype=torch.int32), torch.zeros(num_slots, dtype=torch.int32)
    keys, values = [], []
    for place, (slot, length, start) in enumerate(zip(slots.tolist(), lengths, starts, strict=True)):
        if length == 0:
            slots[place] = 0
            slot = 0
        length_of[slot], start_of[slot] = length, start
        mine = [pages.pop() for _ in range(per_slot[place])]
        table[slot, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        k, v = torch.randn(2, length, heads.num_kv_heads, heads.dim, device=device)
        k = (k * (1 + growth * torch.linspace(0, 1, length, device=device)[:, None, None])).to(dtype).to(kept)
        v = v.to(dtype).to(kept)
        k[:start], v[:start] = torch.nan, torch.nan
        at = torch.arange(length)
        page, offset = table[slot].long()[at // heads.page].to(device), (at % heads.page).to(device)
        # torch moves e4m3 as bytes.
        raw = BITS[kept.itemsize]
        arena.view(raw)[page, 0, offset], arena.view(raw)[page, 1, offset] = k.view(raw), v.view(raw)
        keys.append(k.to(dtype))
        values.append(v.to(dtype))
    context = Context(*(x.int().to(device) for x in (table, slots, start_of, length_of)))
    return PagedContext(keys, values, arena[:, 0], arena[:, 1], starts, context)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [num, heads, d] of q [num, heads, d] over k, v [S, kv_heads, d]; seen bool [num, S]; sink [heads]."""
    k, v = (x.double().nan_to_num(0.0).repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(-1, len(q), 1)], dim=2)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def dense_block_attention(
    paged: PagedContext,
    block: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    causal: bool,
    window: int,
    scale: float,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [N, B, heads, d]: what block_attention promises for q, k, v, place by place."""
    found = []
    for place, (q, k, v) in enumerate(zip(*block, strict=True)):
        length, num_rows = len(paged.keys[place]), len(q)
        at = torch.arange(length + num_rows, device=q.device)
        rows = length + torch.arange(num_rows, device=q.device)[:, None]
        seen = (at >= paged.starts[place]) & (at >= 0).expand(num_rows, -1)
        if causal:
            seen = seen & (at <= rows)
        if window:
            seen = seen & ((rows - at).abs() < window)
        keys, values = torch.cat([paged.keys[place], k]), torch.cat([paged.values[place], v])
        found.append(dense_attention(q, keys, values, seen, scale, sink))
    return torch.stack(found)
