"""Rows of a slot as kernels of the gated delta net read them: from a state's page, from the ring, from the block.

Rows [s, L) lie in the ring, [L, L + B) in the block; the convolution reaches a few rows further back, which lie with
the state that stands at s.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false

from typing import NamedTuple

import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_SILU = tl.constexpr("""{
    .reg .f32 y;
    mul.ftz.f32 y, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 y, y;
    add.ftz.f32 y, y, 0f3F800000;
    rcp.approx.ftz.f32 y, y;
    mul.ftz.f32 $0, $1, y;
}""")
"""x / (1 + e^-x); the first number is -log2(e)."""


class SlotRows(NamedTuple):
    """Where the rows of a slot are: addresses, and strides between rows."""

    ring_raw: tuple
    """For each page of the ring: where row 0 would be if all pages were behind each other and this one in its place."""
    ring_gates: tuple
    turn: tl.tensor
    """The position at which the ring began anew, at or before s."""
    raw: tl.tensor
    """Of the block."""
    gates: tl.tensor
    conv_rows: tl.tensor
    """Of the page of the state."""
    has_state: tl.tensor
    """Else zeros are before the first row."""
    raw_stride: tl.tensor
    gates_stride: tl.tensor
    beta_stride: tl.tensor
    first: tl.tensor
    """s"""
    length: tl.tensor
    """L"""


@triton.jit
def ring_pages(ring, ids, stride, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Addresses of a ring's pages, as SlotRows has them; ids as load_ring has them, rows of WIDTH numbers."""
    pages = ()
    for i in tl.static_range(len(ids)):
        pages += (ring + (ids[i] * stride - i * PAGE_ROWS * WIDTH),)
    return pages


@triton.jit
def _in_ring(position, pages, turn, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Addresses of rows from s on."""
    row = position - turn
    row = tl.where(row >= PAGE_ROWS * len(pages), row - PAGE_ROWS * len(pages), row)
    page = pages[0]
    for i in tl.static_range(1, len(pages)):
        page = tl.where(row >= i * PAGE_ROWS, pages[i], page)
    return page + row * WIDTH


@triton.jit
def _find_raw(position, rows, CONV: tl.constexpr, KERNEL: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """(addresses of the raw inputs of rows, whether they are more than zeros)."""
    at = _in_ring(position, rows.ring_raw, rows.turn, CONV, PAGE_ROWS)
    at = tl.where(position < rows.length, at, rows.raw + (position - rows.length) * rows.raw_stride)
    before = position - rows.first
    at = tl.where(before < 0, rows.conv_rows + (before + KERNEL - 1) * CONV, at)
    return at, rows.has_state | (before >= 0)


@triton.jit
def load_gates(position, rows, head, seen, HEADS: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """(g, beta) of rows for a head, zeros where they are not seen."""
    replayed = position < rows.length
    ring = _in_ring(position, rows.ring_gates, rows.turn, 2 * HEADS, PAGE_ROWS)
    block = rows.gates + (position - rows.length) * rows.gates_stride
    g, beta = tl.where(replayed, ring, block), tl.where(replayed, ring + HEADS, block + rows.beta_stride)
    return tl.load(g + head, mask=seen, other=0.0), tl.load(beta + head, mask=seen, other=0.0)


@triton.jit
def keep_gates(position, rows, head, g, beta, seen, HEADS: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Store them in the ring."""
    to = _in_ring(position, rows.ring_gates, rows.turn, 2 * HEADS, PAGE_ROWS) + head
    tl.store(to, g, mask=seen)
    tl.store(to + HEADS, beta, mask=seen)


@triton.jit
def load_raw(position, seen_rows, rows, channels, seen, CONV: tl.constexpr, KERNEL: tl.constexpr,
             PAGE_ROWS: tl.constexpr):  # fmt: skip
    """Some channels of rows, a tile for each tuple of channels; zeros where rows or channels are not seen."""
    at, there = _find_raw(position, rows, CONV, KERNEL, PAGE_ROWS)
    tiles = ()
    for i in tl.static_range(len(channels)):
        mask = (seen_rows & there)[:, None] & seen[i][None, :]
        tiles += (tl.load(at[:, None] + channels[i][None, :], mask=mask, other=0.0),)
    return tiles


@triton.jit
def keep_raw(position, seen_rows, rows, channels, seen, tiles, CONV: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Store them in the ring."""
    to = _in_ring(position, rows.ring_raw, rows.turn, CONV, PAGE_ROWS)
    for i in tl.static_range(len(channels)):
        tl.store(to[:, None] + channels[i][None, :], tiles[i], mask=seen_rows[:, None] & seen[i][None, :])


@triton.jit
def _silu(x):
    if COMPILED:
        # Triton's exponential and division provide for numbers near 0, with 14 instructions instead of 5.
        return tl.inline_asm_elementwise(_SILU, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def convolve(tiles, at, channels, seen, conv, CONV: tl.constexpr, KERNEL: tl.constexpr, PRECISION: tl.constexpr):
    """silu of the convolution of tiles of rows `at`, float32; they are consecutive. Of the first KERNEL - 1 it is none.

    Rows are moved by products with ones and zeros, which are exact for 16-bit numbers.
    """
    weights = ()
    for age in tl.static_range(KERNEL):
        for i in tl.static_range(len(tiles)):
            weight = tl.load(conv + (KERNEL - 1 - age) * CONV + channels[i], mask=seen[i], other=0.0)
            weights += (weight,)
    totals = ()
    for age in tl.static_range(KERNEL):
        # One after the other: there is no room for all of them.
        move = (at[:, None] - at[None, :] == age).to(tl.float32).to(tiles[0].dtype)
        sums = ()
        for i in tl.static_range(len(tiles)):
            moved = tl.dot(move, tiles[i], input_precision=PRECISION) * weights[age * len(tiles) + i][None, :]
            sums += (moved if age == 0 else totals[i] + moved,)
        totals = sums
    found = ()
    for i in tl.static_range(len(tiles)):
        found += (_silu(totals[i]),)
    return found
