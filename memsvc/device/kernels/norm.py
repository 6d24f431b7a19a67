"""RMS norm of rows, alone or with the residual sum before it. One launch, one read and one write of each operand."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from memsvc.device.fp8 import QuantRows
from memsvc.device.kernels.fp8_rows import empty_rows, rounded_to_fp8
from memsvc.device.kernels.launch import cut, launch, padded
from memsvc.device.layers import RMSNorm, ZeroCentredRMSNorm

MAX_WIDTH = 16384
"""Widest row: one program holds it in registers."""

TILES = {256: (8, 4), 512: (4, 4), 1024: (2, 4), 2048: (1, 4), 4096: (1, 8), 8192: (1, 8), 16384: (1, 16)}
"""Padded width -> (rows a program, warps)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tap:
    """Where the summed rows are copied to as features."""

    features: torch.Tensor
    """[num_rows, width], the columns of one tapped layer: a view, rows as far apart as they are."""
    first_row: torch.Tensor
    """int32 or int64 [1], on the device: row r of the batch goes to row first_row + r."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Products over parts of k, which are yet to be added up and rounded: a GEMM of few rows that is cut there."""

    values: torch.Tensor
    """float32 [parts, n, width], contiguous"""
    dtype: torch.dtype
    """Of the product."""


@triton.jit
def rounded(x, like):
    """x in float32, rounded as a store to `like` (a pointer) would round it."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def scaled_norm(x, mean_square, weight, like, eps, CENTRED: tl.constexpr):
    """x / rms times weight, both float32: rounded to the type of `like` before the weight unless CENTRED."""
    x *= tl.rsqrt(mean_square + eps)
    if not CENTRED:
        x = rounded(x, like)
    return x * weight


@triton.jit(do_not_specialize=["num_rows"])
def _norm(x, residual, weight, out, scales, like, tap, tap_first, eps, num_rows, x_stride, x_place, x_part,
          residual_stride, residual_place, tap_stride, PARTS: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr,
          ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    seen = (rows < num_rows)[:, None] & (cols < WIDTH)[None, :]
    # Asked for first: nothing may be read ahead of a store, and there are some below.
    scale = tl.load(weight + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    rows = rows.to(tl.int64)
    at_x = (rows // B * x_place + rows % B * x_stride)[:, None] + cols[None, :]
    value = tl.load(x + at_x, mask=seen, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(1, PARTS):
            value += tl.load(x + part * x_part + at_x, mask=seen, other=0.0)
        value = rounded(value, like)
    if residual is not None:
        at = (rows // B * residual_place + rows % B * residual_stride)[:, None] + cols[None, :]
        value += tl.load(residual + at, mask=seen, other=0.0).to(tl.float32)
        # The norm is of the sum as it is stored, not of the sum as it was computed.
        value = rounded(value, residual)
        tl.store(residual + at, value.to(residual.dtype.element_ty), mask=seen)
    if tap is not None:
        at_tap = (tl.load(tap_first).to(tl.int64) + rows)[:, None] * tap_stride + cols[None, :]
        tl.store(tap + at_tap, value.to(tap.dtype.element_ty), mask=seen)
    mean_square = tl.sum(value * value, 1) / WIDTH
    value = scaled_norm(value, mean_square[:, None], scale[None, :], like, eps, CENTRED)
    if scales is not None:
        value, row_scales = rounded_to_fp8(rounded(value, like))
        tl.store(scales + rows, row_scales, mask=rows < num_rows)
    tl.store(out + rows[:, None] * WIDTH + cols[None, :], value.to(out.dtype.element_ty), mask=seen)


def rms_norm(x: torch.Tensor | Parts, norm: RMSNorm) -> torch.Tensor:
    """norm(x) of x [..., width], contiguous.

    x: [n, width] or [N, B, width], rows contiguous; so the rows whose logits are wanted may be a view of all.
    Or the Parts of such x, contiguous.
    """
    out = _empty(x)
    _launch(x, None, norm, None, out)
    return out


def rms_norm_fp8(x: torch.Tensor | Parts, norm: RMSNorm) -> QuantRows:
    """What rms_norm gives, [n, width], in 8 bits for the product that follows."""
    out = _empty_fp8(x)
    _launch(x, None, norm, None, out)
    return out


def add_rms_norm(
    x: torch.Tensor | Parts, residual: torch.Tensor, norm: RMSNorm, tap: Tap | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of residual + x, contiguous; residual, which has become that sum in its own dtype).

    Both of the same shape, as in rms_norm. tap: the sum is copied there too.
    """
    out = _empty(x)
    _launch(x, residual, norm, tap, out)
    return out, residual


def add_rms_norm_fp8(
    x: torch.Tensor | Parts, residual: torch.Tensor, norm: RMSNorm, tap: Tap | None = None
) -> tuple[QuantRows, torch.Tensor]:
    """What add_rms_norm gives, [n, width], the normed rows in 8 bits for the product that follows."""
    out = _empty_fp8(x)
    _launch(x, residual, norm, tap, out)
    return out, residual


def tile(width: int) -> tuple[int, int, int]:
    """(padded width, rows a program, warps) for rows of this width. Raises ValueError if it is too large."""
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} are wider than {MAX_WIDTH}")
    block = padded(width)
    return block, *TILES[max(block, min(TILES))]


def _form(x: torch.Tensor | Parts) -> torch.Tensor:
    """A tensor of the shape of what is normed."""
    return x.values[0] if isinstance(x, Parts) else x


def _empty(x: torch.Tensor | Parts) -> torch.Tensor:
    form = _form(x)
    return torch.empty(form.shape, dtype=x.dtype, device=form.device)


def _empty_fp8(x: torch.Tensor | Parts) -> QuantRows:
    n, width = _form(x).shape
    return empty_rows(n, width, x.dtype, _form(x).device)


def _launch(
    x: torch.Tensor | Parts,
    residual: torch.Tensor | None,
    norm: RMSNorm,
    tap: Tap | None,
    out: torch.Tensor | QuantRows,
) -> None:
    source, form = x.values if isinstance(x, Parts) else x, _form(x)
    if residual is not None and form.shape != residual.shape:
        raise ValueError(f"x is {list(form.shape)}, the residual {list(residual.shape)}")
    width = form.shape[-1]
    block, rows, warps = tile(width)
    num_rows = form.numel() // width
    values, scales = (out.values, out.scales) if isinstance(out, QuantRows) else (out, None)
    # Of what it is given the kernel knows the dtype of the product by a tensor alone.
    like = values if scales is None else torch.empty(0, dtype=x.dtype, device=form.device)
    launch(
        _norm, (cut(num_rows, rows),), warps, source, residual, norm.weight, values, scales, like,
        tap and tap.features, tap and tap.first_row, norm.eps, num_rows, *row_strides(form), source.stride(0),
        *(row_strides(residual) if residual is not None else (0, 0)), tap.features.stride(0) if tap else 0,
        PARTS=len(source) if isinstance(x, Parts) else 0, B=form.shape[1] if form.dim() == 3 else 1, WIDTH=width,
        ROWS=rows, BLOCK=block, CENTRED=isinstance(norm, ZeroCentredRMSNorm),
    )  # fmt: skip


def row_strides(x: torch.Tensor) -> tuple[int, int]:
    """(from row to row, from place to place) of x [n, width], one row a place, or [N, B, width]."""
    assert x.dim() in (2, 3), f"rows are [n, width] or [N, B, width], not {list(x.shape)}"
    assert x.stride(-1) == 1, f"strides {x.stride()}: rows are not contiguous"
    return x.stride(-2), x.stride(0)
