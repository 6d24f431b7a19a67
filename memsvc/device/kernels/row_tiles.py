"""Rows of logits as the token kernels read them: the order of floats, and maxima of blocks of neighbours."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import triton
import triton.language as tl

from memsvc.device.kernels.slot_fields import Slot, adjust

INT_MIN = tl.constexpr(-(2**31))
INT_MAX = tl.constexpr(2**31 - 1)


class Row(NamedTuple):
    """One row of a verify inside a kernel."""

    logits: tl.tensor
    """Address of its first logit."""
    col_stride: tl.tensor
    vocab: tl.tensor
    slot: Slot
    place: tl.tensor
    """j: it stands j tokens after the anchor."""


@triton.jit
def row_logits(row, ids, inside):
    """Adjusted logits float32 of ids, -inf outside."""
    x = tl.load(row.logits + ids * row.col_stride, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(inside, adjust(x, ids, inside, row.slot, row.place), float("-inf"))


@triton.jit
def divided(x, divisor):
    """x / divisor, a scalar, rounded as IEEE says."""
    return tl.div_rn(x, tl.zeros_like(x) + divisor)


@triton.jit
def order_key(x):
    """int32 in the order of x float32: zeros of either sign are equal, a NaN comes after everything."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), INT_MAX)


@triton.jit
def key_value(key):
    """The float32 whose order_key is key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(x):
    """Neither infinite nor NaN."""
    return (x < float("inf")) & (x > float("-inf"))


@triton.jit
def nan_max(x, AXIS: tl.constexpr):
    """Maxima along an axis, NaN where there is one."""
    top = tl.max(tl.where(x == x, x, float("-inf")), AXIS)
    any_nan = tl.max((x != x).to(tl.int32), AXIS) > 0
    return tl.where(any_nan, float("nan"), top)


@triton.jit
def block_maxima(logits, col_stride, vocab, blocks, SIZE: tl.constexpr, WIDTH: tl.constexpr, NUM: tl.constexpr):
    """Maxima float32 [NUM] of blocks of SIZE neighbours, NaN where one is; -inf for blocks past the vocabulary.

    WIDTH columns are read at a time: many loads are in flight, and a maximum costs one instruction an element.
    """
    cols = tl.arange(0, WIDTH)
    top = tl.full([NUM, WIDTH], float("-inf"), tl.float32)
    for part in tl.static_range(SIZE // WIDTH):
        ids = (blocks * SIZE + part * WIDTH)[:, None] + cols[None, :]
        x = tl.load(logits + ids * col_stride, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
    return nan_max(top, 1)


@triton.jit
def store_adjusted_maxima(row, out, first, num_blocks, SIZE: tl.constexpr, NUM: tl.constexpr, STEP: tl.constexpr):
    """block_maxima of adjusted logits, for blocks [first, first + NUM) to out + block, STEP of them at a time.

    Penalties need many registers for an element: small tiles leave the other rows their occupancy.
    """
    for start in range(0, NUM, STEP):
        blocks = first + start + tl.arange(0, STEP)
        ids = (blocks * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
        tl.store(out + blocks, nan_max(row_logits(row, ids, ids < row.vocab), 1), mask=blocks < num_blocks)
