"""Around the recurrence of a gated delta net: what a row forgets and takes in, and how much of its output passes."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.launch import cut, launch, padded
from memsvc.device.kernels.mlp import activate
from memsvc.device.kernels.norm import rounded, row_strides, scaled_norm, tile
from memsvc.device.layers import GatedRMSNorm

GATE_ROWS, GATE_WARPS = 4, 2
"""Rows of a program that computes gates, and its warps."""


@triton.jit
def _softplus(x):
    """log(1 + e^x), good to the last places also where it is near 0; x itself above 20, as torch has it."""
    e = tl.exp(tl.minimum(x, 20.0))
    sum = 1.0 + e
    # What the sum has lost of e, the quotient puts back.
    small = tl.where(sum == 1.0, e, tl.log(sum) * (e / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit(do_not_specialize=["num_rows"])
def _gates(b, a, rate, dt_bias, out, num_rows, b_stride, a_stride, HEADS: tl.constexpr, ROWS: tl.constexpr,
           PAD: tl.constexpr):  # fmt: skip
    rows, heads = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, PAD)
    there = heads < HEADS
    seen = (rows < num_rows)[:, None] & there[None, :]
    scale = tl.load(rate + heads, mask=there, other=0.0)
    bias = tl.load(dt_bias + heads, mask=there, other=0.0)
    x = tl.load(a + rows[:, None] * a_stride + heads[None, :], mask=seen, other=0.0).to(tl.float32)
    y = tl.load(b + rows[:, None] * b_stride + heads[None, :], mask=seen, other=0.0).to(tl.float32)
    at = out + rows[:, None] * (2 * HEADS) + heads[None, :]
    tl.store(at, scale[None, :] * _softplus(x + bias[None, :]), mask=seen)
    tl.store(at + HEADS, activate(y, "sigmoid"), mask=seen)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm(x, gate, weight, out, eps, num_rows, gate_stride, gate_place, HEADS: tl.constexpr, WIDTH: tl.constexpr,
                ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    seen = (rows < num_rows)[:, None] & (cols < WIDTH)[None, :]
    scale = tl.load(weight + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    at = rows[:, None] * WIDTH + cols[None, :]
    value = tl.load(x + at, mask=seen, other=0.0).to(tl.float32)
    at_gate = (rows // HEADS * gate_place + rows % HEADS * gate_stride)[:, None] + cols[None, :]
    passed = activate(tl.load(gate + at_gate, mask=seen, other=0.0).to(tl.float32), "silu")
    mean_square = tl.sum(value * value, 1) / WIDTH
    value = rounded(scaled_norm(value, mean_square[:, None], scale[None, :], out, eps, False), out)
    tl.store(out + at, (value * passed).to(out.dtype.element_ty), mask=seen)


def delta_gates(b: torch.Tensor, a: torch.Tensor, rate: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """g = rate * softplus(a + dt_bias) and beta = sigmoid(b) of rows, [n, 2, heads] float32.

    b and a [n, heads], rows contiguous; rate and dt_bias float32, of which the first `heads` are read.
    """
    assert a.shape == b.shape, f"a {list(a.shape)}, b {list(b.shape)}"
    assert a.stride(1) == b.stride(1) == 1, f"strides of a {a.stride()}, of b {b.stride()}"
    n, heads = a.shape
    out = torch.empty((n, 2, heads), dtype=torch.float32, device=a.device)
    launch(
        _gates, (cut(n, GATE_ROWS),), GATE_WARPS, b, a, rate, dt_bias, out, n, b.stride(0), a.stride(0), HEADS=heads,
        ROWS=GATE_ROWS, PAD=padded(heads),
    )  # fmt: skip
    return out


def gated_norm(x: torch.Tensor, gate: torch.Tensor, norm: GatedRMSNorm) -> torch.Tensor:
    """norm.gated(x, gate) of x [n, heads, width], contiguous, and gate [n, heads, width]: [n, heads * width]."""
    assert x.shape == gate.shape, f"x {list(x.shape)}, gate {list(gate.shape)}"
    assert x.is_contiguous(), f"strides of x {x.stride()}"
    n, heads, width = x.shape
    out = torch.empty((n, heads * width), dtype=gate.dtype, device=x.device)
    block, rows, warps = tile(width)
    launch(
        _gated_norm, (cut(n * heads, rows),), warps, x, gate, norm.weight, out, norm.eps, n * heads,
        *row_strides(gate), HEADS=heads, WIDTH=width, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return out
