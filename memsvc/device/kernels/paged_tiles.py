"""Pieces of attention kernels over paged keys and values: one tile of positions, and the running softmax."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl

from memsvc.device.fp8 import E4M3

__all__ = ["LOG2_E", "attend_context", "load_rows", "reads", "take_in"]

LOG2_E = tl.constexpr(1.4426950408889634)
"""Scores are kept in powers of two, which the device has an instruction for: exp(x) = 2^(x * LOG2_E)."""


def reads(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> bool:
    """attend_context takes such pages with such queries."""
    return k_pages.dtype == v_pages.dtype and k_pages.dtype in (q.dtype, E4M3)


@triton.jit
def load_rows(base, rows, num_rows, row_stride, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[len(rows), PADDED] of base [num_rows, DIM]: rows past the end and columns past DIM are 0."""
    dims = tl.arange(0, PADDED)
    here = (rows < num_rows)[:, None] & (dims < DIM)[None, :]
    return tl.load(base + rows[:, None] * row_stride + dims[None, :], mask=here, other=0.0)


@triton.jit
def take_in(scores, values, top, total, acc, PRECISION: tl.constexpr):
    """One more tile of keys: scores [rows, n] in powers of two, -inf where a row does not see; values [n, d].

    top, total [rows]: highest score so far and the sum of 2^(score - top). acc [rows, d]: the weighted values.
    """
    higher = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key yet: -inf minus -inf would be NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return higher, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def attend_context(
    queries, row_positions, top, total, acc,
    k_pages, v_pages, table, page_stride, slot_stride, scale,
    first, length, first_tile, end_tile,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """take_in of tiles [first_tile, end_tile) of positions [first, length), BLOCK a tile.

    k_pages, v_pages: already at the key-value head; e4m3 is widened to the dtype of queries. table: the request's row
    of page ids.
    """
    steps, dims = tl.arange(0, BLOCK), tl.arange(0, PADDED)
    at = first + first_tile * BLOCK + steps
    page = tl.load(table + at // PAGE, mask=at < length, other=0)
    for tile in range(first_tile, end_tile):
        at = first + tile * BLOCK + steps
        exists = at < length
        # An arena holds more than 2^31 elements.
        place = page.to(tl.int64) * page_stride + (at % PAGE) * slot_stride
        # The next tile's pages, a round ahead of the keys they lead to: those can then be loaded without waiting.
        ahead = at + BLOCK
        page = tl.load(table + ahead // PAGE, mask=ahead < length, other=0)
        where = place[:, None] + dims[None, :]
        # Neither bytes past the end nor those of a dummy page are ever read: they may be NaN, and 0 * NaN is NaN.
        here = exists[:, None] & (dims < DIM)[None, :]
        keys = tl.load(k_pages + where, mask=here, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        seen = exists[None, :]
        if CAUSAL:
            seen = seen & (at[None, :] <= row_positions[:, None])
        if WINDOW > 0:
            seen = seen & (row_positions[:, None] - at[None, :] < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        values = tl.load(v_pages + where, mask=here, other=0.0).to(queries.dtype)
        top, total, acc = take_in(scores, values, top, total, acc, PRECISION)
    return top, total, acc
