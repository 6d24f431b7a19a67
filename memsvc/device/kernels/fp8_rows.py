"""Rows in fp8 as memsvc.device.fp8.quantise rounds them, alone or as the last part of another kernel."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from memsvc.device.fp8 import E4M3, LARGEST, LEAST_PEAK, QuantRows
from memsvc.device.kernels.launch import launch, padded
from memsvc.device.kernels.row_tiles import nan_max

MAX_WIDTH = 32768
"""Widest row: one program holds it in registers."""
_MOST, _LEAST = tl.constexpr(LARGEST), tl.constexpr(LEAST_PEAK)


@triton.jit
def cut_to_fp8(value):
    """value float32 in e4m3: the nearest, cut off past the largest; NaN stays NaN."""
    value = tl.clamp(value, -_MOST, _MOST, propagate_nan=tl.PropagateNan.ALL)
    return value.to(tl.float8e4nv)


@triton.jit
def rounded_to_fp8(value):
    """(value in e4m3 [ROWS, BLOCK], scales float32 [ROWS]) of value float32, zeros where no row is."""
    peak = tl.maximum(nan_max(tl.abs(value), 1), _LEAST, propagate_nan=tl.PropagateNan.ALL)
    most = tl.zeros_like(peak) + _MOST
    return cut_to_fp8(value * tl.div_rn(most, peak)[:, None]), tl.div_rn(peak, most)


@triton.jit
def _quantise(x, values, scales, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    cols = tl.arange(0, BLOCK)
    seen = (cols < WIDTH)[None, :]
    value = tl.load(x + row[:, None] * x_stride + cols[None, :], mask=seen, other=0.0).to(tl.float32)
    codes, scale = rounded_to_fp8(value)
    tl.store(values + row[:, None] * WIDTH + cols[None, :], codes, mask=seen)
    tl.store(scales + row, scale)


def row_tile(width: int) -> tuple[int, int]:
    """(padded width, warps) for one row of this width a program. Raises ValueError if it is too large."""
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} are wider than {MAX_WIDTH}")
    block = padded(width)
    return block, min(32, max(4, block // 1024))


def empty_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> QuantRows:
    """Rows to be written."""
    values = torch.empty((num_rows, width), dtype=E4M3, device=device)
    return QuantRows(values, torch.empty((num_rows, 1), device=device), dtype)


def quantise_rows(x: torch.Tensor) -> QuantRows:
    """fp8.quantise of x [n, width], rows contiguous."""
    assert x.stride(1) == 1, f"strides {x.stride()}: rows are not contiguous"
    n, width = x.shape
    block, warps = row_tile(width)
    out = empty_rows(n, width, x.dtype, x.device)
    launch(_quantise, (n,), warps, x, out.values, out.scales, x.stride(0), WIDTH=width, BLOCK=block)
    return out
