"""Keys and values into their pages: a block's own, or those of all layers that features give. One launch."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.heads import half_sizes, kept, load_part, store_part, turn_heads
from memsvc.device.kernels.launch import cut, launch, padded
from memsvc.device.kernels.places import Rows, TokenRows, find_page, find_row, row_arguments
from memsvc.device.kv_pool import KvPool
from memsvc.device.layers import RMSNorm, Rotary

_PAGE_STRIDES = ("page_stride", "layer_stride", "half_stride", "token_stride")
ELEMENTS, WARPS = 1024, 2
"""Of one program: elements of K and as many of V, padded, and warps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRows:
    """Which of N x B feature rows are tokens, and where: rows j < num_rows[m] of place i, m = members[i].

    Row j is the token at position starts[m] + j; or, if `ends` is given, at ends[m] - num_rows[m] + j. The others
    are not written anywhere.
    """

    members: torch.Tensor
    """int32 [N]"""
    num_rows: torch.Tensor
    """int32 [num_slots + 1], at most block_size each."""
    block_size: int
    """B."""
    page_table: torch.Tensor
    """int32 [num_slots + 1, max_pages]"""
    starts: torch.Tensor | None = None
    """int32 [num_slots + 1]: position of the first row."""
    ends: torch.Tensor | None = None
    """int32 [num_slots + 1]: position after the last row that is a token: SlotState.length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextSpec:
    """What becomes of the raw projections of context K and V."""

    k_norm: RMSNorm
    """weight [L, 1, d] or [L, d], not zero-centred."""
    rotary: Rotary
    """Its frequencies lie where the projections do."""
    value_scale: float = 1.0
    """Multiplies v."""


@triton.jit
def _write_block(k, v, k_pages, v_pages, positions, members, done, page_table, slots, k_stride, v_stride,
                 table_stride, table_width, page_stride, token_stride, page_head_stride, B: tl.constexpr,
                 PAGE: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
                 CHUNK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    head, dims = tl.arange(0, CHUNK) + tl.program_id(1) * CHUNK, tl.arange(0, D_PAD)
    if slots is not None:
        slot = tl.load(slots + row).to(tl.int64)
        page, offset = slot // PAGE, slot % PAGE
    else:
        position, member = find_row(row, positions, members, B)
        page, offset = find_page(position, member, done, page_table, table_stride, table_width, PAGE)
    seen = (head < KV)[:, None] & (dims < D)[None, :]
    at = head[:, None] * D + dims[None, :]
    at_page = page * page_stride + offset * token_stride + head[:, None] * page_head_stride + dims[None, :]
    wide = row.to(tl.int64)
    store_part(k_pages, at_page, tl.load(k + wide * k_stride + at, mask=seen), seen)
    store_part(v_pages, at_page, tl.load(v + wide * v_stride + at, mask=seen), seen)


@triton.jit
def _context_place(row, slots, positions, members, num_rows, page_table, table_stride, table_width,
                   FROM_END: tl.constexpr, B: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """(is a token, its position, page, offset) of a row; slots as in TokenRows, else members as in ContextRows."""
    if slots is not None:
        slot = tl.load(slots + row).to(tl.int64)
        return True, tl.load(positions + row).to(tl.int32), slot // PAGE, slot % PAGE
    else:
        member = tl.load(members + row // B)
        count, step = tl.load(num_rows + member), row % B
        first = tl.load(positions + member)
        if FROM_END:
            first -= count
        position = (first + step).to(tl.int32)
        page, offset = find_page(position, member, None, page_table, table_stride, table_width, PAGE)
        return step < count, position, page, offset


@triton.jit
def _write_context(kv, pages, frequencies, k_weight, slots, members, positions, num_rows, page_table, eps, rope_scale,
                   value_scale, table_stride, table_width, page_stride, layer_stride, half_stride, token_stride,
                   FROM_END: tl.constexpr, B: tl.constexpr, PAGE: tl.constexpr, L: tl.constexpr, KV: tl.constexpr,
                   D: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr, REST_PAD: tl.constexpr,
                   D_PAD: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    row, layer = tl.program_id(0), tl.program_id(1)
    is_token, position, page, offset = _context_place(
        row, slots, positions, members, num_rows, page_table, table_stride, table_width, FROM_END, B, PAGE
    )
    if is_token:
        target = pages + page * page_stride + offset * token_stride + layer.to(tl.int64) * layer_stride
        source = kv + (row.to(tl.int64) * L + layer) * (2 * KV * D)
        head, dims = tl.arange(0, CHUNK) + tl.program_id(2) * CHUNK, tl.arange(0, D_PAD)
        seen, at = (head < KV)[:, None] & (dims < D)[None, :], head[:, None] * D + dims[None, :]
        value = load_part(source + KV * D, at, seen)
        turn_heads(source, target, None, k_weight + layer * D, eps, position, frequencies, rope_scale, head, KV, 0, 0,
                   D, HALF, PAD, REST_PAD, False)  # fmt: skip
        store_part(target + half_stride, at, kept(value * value_scale, target, source), seen)


def write_block_kv(k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, rows: Rows) -> None:
    """k and v [n, KV, d], heads of a row contiguous, into KvPool.k(layer) and .v(layer) where rows stand."""
    n, kv_heads, d = k.shape
    assert rows.num_rows == n, f"{n} rows of k stand at {rows.num_rows} places"
    assert k.stride()[1:] == v.stride()[1:] == (d, 1), f"strides of k {k.stride()}, of v {v.stride()}"
    assert k_pages.stride() == v_pages.stride(), f"pages of k and v differ: {k_pages.stride()}, {v_pages.stride()}"
    width = padded(d)
    chunk = max(1, min(padded(kv_heads), ELEMENTS // width))
    launch(
        _write_block, (n, cut(kv_heads, chunk)), WARPS, k, v, k_pages, v_pages, k_stride=k.stride(0),
        v_stride=v.stride(0), page_stride=k_pages.stride(0), token_stride=k_pages.stride(1),
        page_head_stride=k_pages.stride(2), **row_arguments(rows, k_pages.shape[1]), KV=kv_heads, D=d, D_PAD=width,
        CHUNK=chunk,
    )  # fmt: skip


def write_context_kv(kv: torch.Tensor, spec: ContextSpec, pool: KvPool, rows: ContextRows | TokenRows) -> None:
    """K normed and turned, and V scaled, of all layers, into the pool's pages: what DraftModel.context computes.

    kv: raw projections [n, L, 2 (K, V), KV, d], contiguous, of N * B rows or of tokens. Only tokens are written.
    """
    n, num_layers, _, kv_heads, d = kv.shape
    assert kv.is_contiguous(), f"strides {kv.stride()}"
    pages = pool.pages
    width = padded(d)
    chunk = max(1, min(padded(kv_heads), ELEMENTS // width))
    launch(
        _write_context, (n, num_layers, cut(kv_heads, chunk)), WARPS, kv, pages, spec.rotary.frequencies,
        spec.k_norm.weight, eps=spec.k_norm.eps, rope_scale=spec.rotary.scale, value_scale=spec.value_scale,
        **_context_arguments(rows, n), **dict(zip(_PAGE_STRIDES, pages.stride()[:4], strict=True)),
        PAGE=pool.page_size, L=num_layers, KV=kv_heads, **half_sizes(spec.rotary.rotary_dim, d), D_PAD=width,
        CHUNK=chunk,
    )  # fmt: skip


def _context_arguments(rows: ContextRows | TokenRows, num_rows: int) -> dict[str, object]:
    """Where rows stand, as _context_place reads it. Raises ValueError if they do not say."""
    if isinstance(rows, TokenRows):
        assert rows.num_rows == num_rows, f"{num_rows} rows stand at {rows.num_rows} places"
        if rows.slots is None:
            raise ValueError("rows go to pages, but TokenRows has no slots")
        return {
            "slots": rows.slots, "positions": rows.positions, "members": None, "num_rows": None, "page_table": None,
            "table_stride": 0, "table_width": 0, "FROM_END": False, "B": 1,
        }  # fmt: skip
    num_places = len(rows.members)
    assert num_rows == num_places * rows.block_size, f"{num_rows} rows for {num_places} places of {rows.block_size}"
    positions, table = rows.ends if rows.starts is None else rows.starts, rows.page_table
    if positions is None:
        raise ValueError("ContextRows needs starts or ends")
    return {
        "slots": None, "positions": positions, "members": rows.members, "num_rows": rows.num_rows, "page_table": table,
        "table_stride": table.stride(0), "table_width": table.shape[1], "FROM_END": rows.starts is None,
        "B": rows.block_size,
    }  # fmt: skip
