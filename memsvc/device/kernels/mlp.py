"""Elementwise products of an MLP's halves and of attention's output and its gate. One launch."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from memsvc.device.fp8 import QuantRows
from memsvc.device.kernels.fp8_rows import empty_rows, rounded_to_fp8, row_tile
from memsvc.device.kernels.launch import cut, launch
from memsvc.device.kernels.norm import rounded

BLOCK, WARPS = 1024, 4
"""Columns of one program, and warps: 16 bytes of bfloat16 a thread."""

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", "sigmoid")
"""layers.ACTIVATIONS by the same names, and sigmoid, the gate of attention's output."""


@triton.jit
def activate(x, NAME: tl.constexpr):
    """The activation of that name of x float32."""
    if NAME == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif NAME == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_pytorch_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # 0.5 * (1 + tanh(t)) = 1 / (1 + exp(-2 t)), and exp may overflow: 1 / inf is 0.
        x = x / (1.0 + tl.exp(-2.0 * inner))
    elif NAME == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def _gated(gate, up, out, gate_stride, up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NAME: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = cols < WIDTH
    g = tl.load(gate + row * gate_stride + cols, mask=seen, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + cols, mask=seen, other=0.0).to(tl.float32)
    value = rounded(activate(g, NAME), out) * u
    tl.store(out + row * WIDTH + cols, value.to(out.dtype.element_ty), mask=seen)


@triton.jit
def _gated_fp8(gate, up, out, scales, gate_stride, up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
               NAME: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    cols = tl.arange(0, BLOCK)[None, :]
    seen = cols < WIDTH
    g = tl.load(gate + row[:, None] * gate_stride + cols, mask=seen, other=0.0).to(tl.float32)
    u = tl.load(up + row[:, None] * up_stride + cols, mask=seen, other=0.0).to(tl.float32)
    value, scale = rounded_to_fp8(rounded(rounded(activate(g, NAME), up) * u, up))
    tl.store(out + row[:, None] * WIDTH + cols, value, mask=seen)
    tl.store(scales + row, scale)


def silu_mul(gate_up: torch.Tensor, act: str = "silu") -> torch.Tensor:
    """act(gate) * up [n, I] of gate_up [n, 2 I], gate first, as layers.GatedMlp rounds it."""
    width = gate_up.shape[1] // 2
    return gate_mul(gate_up[:, :width], gate_up[:, width:], act)


def gate_mul(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) * up, contiguous [n, width]; both [n, width] with contiguous rows, act one of ACTIVATIONS."""
    _check(gate, up, act)
    n, width = gate.shape
    out = torch.empty((n, width), dtype=up.dtype, device=up.device)
    launch(
        _gated, (n, cut(width, BLOCK)), WARPS, gate, up, out, gate.stride(0), up.stride(0), WIDTH=width,
        BLOCK=BLOCK, NAME=act,
    )  # fmt: skip
    return out


def silu_mul_fp8(gate_up: torch.Tensor, act: str = "silu") -> QuantRows:
    """What silu_mul gives, in 8 bits for the product that follows."""
    width = gate_up.shape[1] // 2
    return gate_mul_fp8(gate_up[:, :width], gate_up[:, width:], act)


def gate_mul_fp8(gate: torch.Tensor, up: torch.Tensor, act: str) -> QuantRows:
    """What gate_mul gives, likewise. One program a row."""
    _check(gate, up, act)
    n, width = gate.shape
    block, warps = row_tile(width)
    out = empty_rows(n, width, up.dtype, up.device)
    launch(
        _gated_fp8, (n,), warps, gate, up, out.values, out.scales, gate.stride(0), up.stride(0), WIDTH=width,
        BLOCK=block, NAME=act,
    )  # fmt: skip
    return out


def _check(gate: torch.Tensor, up: torch.Tensor, act: str) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"activation {act!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    assert gate.shape == up.shape, f"gate {list(gate.shape)}, up {list(up.shape)}"
    assert gate.stride(1) == up.stride(1) == 1, f"strides of gate {gate.stride()}, of up {up.stride()}"
