"""Attention of blocks of rows over paged context, planned on the device: for graphs, which allow no host plan.

Every request of a batch has the same B rows: a drafter's block, or the target's drafts to verify. The context of
each is cut into tiles, and the tiles of all requests are shared out in chunks of like size to a fixed number of
programs, by the lengths that the device holds at that time: one long request among short ones takes most of them.
A program has all rows of its key-value head (B x query heads of it), so keys and values are read once.

A second kernel adds up what the chunks of a request found. It could be done by whichever program comes last, which
saves the launch, but with few requests and long contexts (where time is shortest) one program a head would then read
some 40 partial results, while the second kernel has a program a row; and it needs no counters that a killed graph
could leave behind. A request of one chunk, as in large batches, is written at once, and the second kernel passes it.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.attention_tiles import AttentionScratch, choose_tile, padded_rows
from memsvc.device.kernels.paged_tiles import LOG2_E, attend_context, load_rows, reads, take_in

__all__ = ["Context", "block_attention"]

_MERGE_CHUNKS = 8
"""Partial results that a program of the second kernel reads at a time."""
_MERGE_PROGRAMS = 2048
"""Programs of the second kernel, about: half of what an H200 holds at a time."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the rows of a batch see in the pages. All on the device; read by the kernels and by nobody else."""

    page_table: torch.Tensor
    """int32 [slots + 1, max_pages]: page ids by slot; a row is contiguous."""
    members: torch.Tensor
    """int32 [N]: the slot of each place of the batch. Slot 0 has length 0."""
    starts: torch.Tensor
    """int32 [slots + 1]: the first position that may be read."""
    lengths: torch.Tensor
    """int32 [slots + 1]: positions written; the block's row j is at position length + j."""


@triton.jit
def _context_of(starts, lengths, member, here, WINDOW: tl.constexpr):
    """(first, length): row 0 of the block sees furthest back, to first; first = length if there is no context."""
    length = tl.load(lengths + member, mask=here, other=0)
    first = tl.load(starts + member, mask=here, other=0)
    if WINDOW > 0:
        first = tl.maximum(first, length - WINDOW + 1)
    return tl.minimum(first, length), length


@triton.jit
def _find_chunk(slot, members, starts, lengths, num_places, num_splits,
                PLACES: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(place, first chunk slot of the place, tiles a chunk) of a chunk slot; place >= num_places if no place has it.

    Chunk slots are given out place by place. A place has ceil(tiles / tiles a chunk) of them, its own block being
    one tile more; with N places that is num_splits + N - 1 in all at most.
    """
    places = tl.arange(0, PLACES)
    here = places < num_places
    member = tl.load(members + places, mask=here, other=0)
    first, length = _context_of(starts, lengths, member, here, WINDOW)
    tiles = tl.where(here, 1 + tl.cdiv(length - first, BLOCK), 0)
    tiles_a_chunk = tl.cdiv(tl.sum(tiles, 0), num_splits)
    ends = tl.cumsum(tl.cdiv(tiles, tiles_a_chunk), 0)
    before = ends <= slot
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0), tiles_a_chunk


@triton.jit
def _attend_block(queries, rows, top, total, acc, k, v, k_row_stride, v_row_stride, scale,
                  B: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr, WINDOW: tl.constexpr,
                  CAUSAL: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """take_in of the block's own keys and values [B, DIM], which are in no page."""
    own = tl.arange(0, OWN)
    keys = load_rows(k, own, B, k_row_stride, DIM, PADDED)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    back = (rows // GROUP)[:, None] - own[None, :]
    seen = (own < B)[None, :]
    if CAUSAL:
        seen = seen & (back >= 0)
    if WINDOW > 0:
        seen = seen & (back < WINDOW) & (back > -WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    return take_in(scores, load_rows(v, own, B, v_row_stride, DIM, PADDED), top, total, acc, PRECISION)


@triton.jit
def _keep(top, total, acc, rows, place, head, slot, num_chunks, out, partial, tops, totals,
          B: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Write the result of a place's only chunk, or what one chunk of several has found."""
    dims = tl.arange(0, PADDED)
    real = rows < B * GROUP
    used = real[:, None] & (dims < DIM)[None, :]
    if num_chunks == 1:
        at = (place * B + rows // GROUP) * (KV_HEADS * GROUP) + head * GROUP + rows % GROUP
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None].to(tl.int64) * DIM + dims[None, :], result, mask=used)
    else:
        kept = (slot.to(tl.int64) * KV_HEADS + head) * (B * GROUP) + rows
        tl.store(partial + kept[:, None] * DIM + dims[None, :], acc, mask=used)
        tl.store(tops + kept, top, mask=real)
        tl.store(totals + kept, total, mask=real)


@triton.jit(do_not_specialize=["num_places", "num_splits"])
def _attend_chunks(
    q, k, v, k_pages, v_pages, page_table, members, starts, lengths, sink, out, partial, tops, totals, plan,
    q_place_stride, q_row_stride, q_head_stride, k_place_stride, k_row_stride, k_head_stride,
    v_place_stride, v_row_stride, v_head_stride, page_stride, slot_stride, head_stride, table_stride,
    scale, num_places, num_splits,
    B: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, ROW_TILES: tl.constexpr, OWN: tl.constexpr, PLACES: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, HAS_SINK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program attends ROWS rows of a key-value head over one chunk of one place's tiles."""
    # Heads next to each other in time: together they read whole rows of a page.
    head, rows = tl.program_id(0) // ROW_TILES, tl.program_id(0) % ROW_TILES * ROWS + tl.arange(0, ROWS)
    slot = tl.program_id(1)
    place, first_slot, tiles_a_chunk = _find_chunk(
        slot, members, starts, lengths, num_places, num_splits, PLACES, WINDOW, BLOCK
    )
    if place >= num_places:
        return
    member = tl.load(members + place).to(tl.int64)
    first, length = _context_of(starts, lengths, member, True, WINDOW)
    num_tiles = 1 + tl.cdiv(length - first, BLOCK)
    num_chunks = tl.cdiv(num_tiles, tiles_a_chunk)
    size = tl.cdiv(num_tiles, num_chunks)
    begin = (slot - first_slot) * size
    end = tl.minimum(begin + size, num_tiles)
    dims, heads, real = tl.arange(0, PADDED), head * GROUP + rows % GROUP, rows < B * GROUP
    at = place * q_place_stride + (rows // GROUP) * q_row_stride + heads * q_head_stride
    used = real[:, None] & (dims < DIM)[None, :]
    queries = tl.load(q + at[:, None] + dims[None, :], mask=used, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    # Tile 0 is the block itself; the context's tiles come after it.
    if begin == 0:
        if HAS_SINK:
            top = tl.load(sink + heads, mask=real, other=0.0).to(tl.float32) * LOG2_E
            total = tl.full([ROWS], 1.0, tl.float32)
        top, total, acc = _attend_block(
            queries, rows, top, total, acc, k + place * k_place_stride + head * k_head_stride,
            v + place * v_place_stride + head * v_head_stride, k_row_stride, v_row_stride, scale,
            B, GROUP, OWN, WINDOW, CAUSAL, DIM, PADDED, PRECISION,
        )  # fmt: skip
        tl.store(plan + 2 * place, first_slot)
        tl.store(plan + 2 * place + 1, num_chunks)
    top, total, acc = attend_context(
        queries, length + rows // GROUP, top, total, acc,
        k_pages + head * head_stride, v_pages + head * head_stride, page_table + member * table_stride,
        page_stride, slot_stride, scale, first, length, tl.maximum(begin, 1) - 1, end - 1,
        PAGE, BLOCK, WINDOW, False, DIM, PADDED, PRECISION,
    )  # fmt: skip
    _keep(top, total, acc, rows, place, head, slot, num_chunks, out, partial, tops, totals,
          B, GROUP, KV_HEADS, DIM, PADDED)  # fmt: skip


@triton.jit
def _merge_row(partial, tops, totals, out, row, head, place, first_slot, num_chunks,
               B: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
               PADDED: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Add up one row of one head of one place, CHUNKS partial results at a time."""
    dims = tl.arange(0, PADDED)
    # The first chunk has the row itself, which every row sees: top is a number from the first round on.
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([PADDED], tl.float32)
    for start in range(0, num_chunks, CHUNKS):
        chunks = start + tl.arange(0, CHUNKS)
        here = chunks < num_chunks
        at = ((first_slot + chunks).to(tl.int64) * KV_HEADS + head) * (B * GROUP) + row
        their_tops = tl.load(tops + at, mask=here, other=float("-inf"))
        their_totals = tl.load(totals + at, mask=here, other=0.0)
        wanted = here[:, None] & (dims < DIM)[None, :]
        pieces = tl.load(partial + at[:, None] * DIM + dims[None, :], mask=wanted, other=0.0)
        higher = tl.maximum(top, tl.max(their_tops, 0))
        weights = tl.exp2(their_tops - higher)
        shrink = tl.exp2(top - higher)
        acc = acc * shrink + tl.sum(pieces * weights[:, None], 0)
        total = total * shrink + tl.sum(their_totals * weights, 0)
        top = higher
    to = (place * B + row // GROUP) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
    result = (acc / total).to(out.dtype.element_ty)
    tl.store(out + to.to(tl.int64) * DIM + dims, result, mask=dims < DIM)


@triton.jit(do_not_specialize=["rows_each"])
def _merge_chunks(
    partial, tops, totals, plan, out, rows_each,
    B: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """A program adds up some rows of one head of one place."""
    head, place = tl.program_id(1), tl.program_id(2)
    first_slot, num_chunks = tl.load(plan + 2 * place), tl.load(plan + 2 * place + 1)
    if num_chunks == 1:
        return
    first = tl.program_id(0) * rows_each
    for row in range(first, tl.minimum(first + rows_each, B * GROUP)):
        _merge_row(partial, tops, totals, out, row, head, place, first_slot, num_chunks,
                   B, GROUP, KV_HEADS, DIM, PADDED, CHUNKS)  # fmt: skip


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    context: Context,
    *,
    causal: bool,
    window: int,
    scratch: AttentionScratch,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, B, heads, d]: attention of q [N, B, heads, d] over paged context and the block's own k, v [N, B, kv_heads, d].

    Row j of place i is at position lengths[m] + j, m = members[i]. It sees positions [max(starts[m], lengths[m] +
    j - window + 1), lengths[m]) of the pages [pages, page, kv_heads, d], and rows r of its own block: r <= j if
    causal, |j - r| < window. window 0: no limit. scale: d^-1/2 if None. sink [heads]: a logit that takes weight to
    nothing. q, k, v and the pages may be strided; d is contiguous. One out may be given, contiguous. All have one
    dtype, but the pages may be e4m3.
    """
    _check(q, k, v, k_pages, v_pages)
    scratch.check(q)
    n, block_size, num_heads, dim = q.shape
    num_kv_heads, page = k.shape[2], k_pages.shape[1]
    num_rows = block_size * num_heads // num_kv_heads
    tile = scratch.tile or choose_tile(num_rows, dim, q.dtype)
    rows, row_tiles = padded_rows(num_rows)
    max_tiles = -(-context.page_table.shape[1] * page // tile.block)
    num_splits = scratch.splits(n, num_kv_heads * row_tiles, max_tiles, tile)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    shape = {
        "B": block_size, "GROUP": num_heads // num_kv_heads, "KV_HEADS": num_kv_heads, "DIM": dim,
        "PADDED": max(16, triton.next_power_of_2(dim)),
    }  # fmt: skip
    found = (scratch.partial, scratch.tops, scratch.totals, scratch.plan)
    _attend_chunks[(num_kv_heads * row_tiles, num_splits + n - 1)](
        q, k, v, k_pages, v_pages, context.page_table, context.members, context.starts, context.lengths,
        q if sink is None else sink, out, *found, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *k_pages.stride()[:3], context.page_table.stride(0),
        (dim**-0.5 if scale is None else scale) * LOG2_E.value, n, num_splits,
        ROWS=rows, ROW_TILES=row_tiles, OWN=max(16, triton.next_power_of_2(block_size)), PLACES=_padded_places(n),
        PAGE=page, BLOCK=tile.block, WINDOW=window, CAUSAL=causal, HAS_SINK=sink is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages, **shape,
    )  # fmt: skip
    # With one split no place has two chunks.
    if num_splits > 1:
        # Few rows: a program each. Many: most places have one chunk, and their programs only find that out.
        rows_each = min(num_rows, 1 + n * num_heads * block_size // _MERGE_PROGRAMS)
        grid = (-(-num_rows // rows_each), num_kv_heads, n)
        _merge_chunks[grid](*found, out, rows_each, CHUNKS=_MERGE_CHUNKS, num_warps=1, **shape)
    return out


def _padded_places(num_places: int) -> int:
    """Few sizes, so that few kernels are compiled for all buckets."""
    return 1 if num_places == 1 else max(16 if num_places <= 16 else 64, 1 << (num_places - 1).bit_length())


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    n, block_size, num_heads, dim = q.shape
    if k.shape != v.shape or k.shape[:2] != (n, block_size) or k.shape[3] != dim or num_heads % k.shape[2]:
        raise ValueError(f"q {list(q.shape)} does not go with k {list(k.shape)} and v {list(v.shape)}")
    if k_pages.shape[2:] != k.shape[2:] or k_pages.shape != v_pages.shape or k_pages.stride() != v_pages.stride():
        raise ValueError(
            f"pages of keys {list(k_pages.shape)} with strides {k_pages.stride()} and of values "
            f"{list(v_pages.shape)} with strides {v_pages.stride()} must be alike, and of {list(k.shape[2:])}"
        )
    if len({q.dtype, k.dtype, v.dtype}) != 1 or not reads(q, k_pages, v_pages):
        raise ValueError(f"q, k, v and pages must have one dtype, got {q.dtype}, {k.dtype} and {k_pages.dtype}")
    if any(x.stride(-1) != 1 for x in (q, k, v, k_pages)):
        raise ValueError("the last dimension of q, k, v and pages must be contiguous")
