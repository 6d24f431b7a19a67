"""x W^T with what follows it: cuBLAS, then one kernel of rows.

A GEMM of few rows with more k than outputs is too few tiles for the device. cuBLAS cuts k then, and adds the parts up
in a kernel of its own; where a norm follows, that adds them up, and cuBLAS gets both halves of k as one batch.
Measured on an H200 with the norm, docs/benchmarks/gemm-parts-h200.json: 4096 x 12288 takes 28.9 instead of 30.4 us at
9 rows, 45.4 instead of 53.0 at 288; 4096 x 4096 13.0 instead of 14.1, and 21.7 instead of 24.7; 5120 x 17408 48.6
instead of 53.8 at 9 rows, but 84.3 instead of 80.5 at 288. Four parts are slower than two everywhere.

Of an fp8 layer the rows are rounded to 8 bits by the kernel before it, where that is one of those here.
"""

from dataclasses import dataclass
from typing import TypeAlias, overload

import torch

from memsvc.device.fp8 import Fp8Linear, QuantRows, Rows
from memsvc.device.kernels.fp8_rows import quantise_rows
from memsvc.device.kernels.mlp import gate_mul, gate_mul_fp8, silu_mul, silu_mul_fp8
from memsvc.device.kernels.norm import Parts, Tap, add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8
from memsvc.device.layers import Linear, RMSNorm

__all__ = [
    "MOST_CUT_ROWS",
    "AddNorm",
    "Epilogue",
    "Gated",
    "gate_for",
    "linear",
    "linear_for",
    "norm_for",
    "pays",
    "product",
    "product_in_parts",
]

NUM_PARTS = 2
MOST_CUT_ROWS = 288
"""More rows are enough tiles, and their parts more bytes."""
_ALIGNED = 64
"""Numbers: a part that begins elsewhere is read slowly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gated:
    """act(gate) * up; the weight is gate's rows, then up's."""

    act: str = "silu"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddNorm:
    """The residual sum, and the norm of it."""

    residual: torch.Tensor
    """[m, n], contiguous. Becomes the sum."""
    norm: RMSNorm
    tap: Tap | None = None


Epilogue: TypeAlias = Gated | AddNorm | None


@overload
def linear(x: Rows, layer: Linear, epilogue: Gated | None = None) -> torch.Tensor: ...
@overload
def linear(x: Rows, layer: Linear, epilogue: AddNorm) -> tuple[torch.Tensor, torch.Tensor]: ...
def linear(x: Rows, layer: Linear, epilogue: Epilogue = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """layer(x) of x [m, k]; with Gated, mlp.silu_mul of it; with AddNorm, (normed, residual) as norm.add_rms_norm's."""
    if isinstance(epilogue, AddNorm):
        return add_rms_norm(product(x, layer), epilogue.residual, epilogue.norm, epilogue.tap)
    out = _whole(x, layer)
    return out if epilogue is None else silu_mul(out, epilogue.act)


@overload
def linear_for(following: Linear, x: Rows, layer: Linear, epilogue: Gated) -> Rows: ...
@overload
def linear_for(following: Linear, x: Rows, layer: Linear, epilogue: AddNorm) -> tuple[Rows, torch.Tensor]: ...
def linear_for(
    following: Linear, x: Rows, layer: Linear, epilogue: Gated | AddNorm
) -> Rows | tuple[Rows, torch.Tensor]:
    """linear, whose rows `following` multiplies: in 8 bits if its weight is."""
    if not isinstance(following, Fp8Linear):
        return linear(x, layer, epilogue)
    if isinstance(epilogue, AddNorm):
        return add_rms_norm_fp8(product(x, layer), epilogue.residual, epilogue.norm, epilogue.tap)
    return silu_mul_fp8(_whole(x, layer), epilogue.act)


def norm_for(following: Linear, x: torch.Tensor, norm: RMSNorm) -> Rows:
    """norm(x) of x [m, k], likewise."""
    return rms_norm_fp8(x, norm) if isinstance(following, Fp8Linear) else rms_norm(x, norm)


def gate_for(following: Linear, gate: torch.Tensor, up: torch.Tensor, act: str) -> Rows:
    """mlp.gate_mul, likewise."""
    return (gate_mul_fp8 if isinstance(following, Fp8Linear) else gate_mul)(gate, up, act)


def _whole(x: Rows, layer: Linear) -> torch.Tensor:
    if isinstance(layer, Fp8Linear):
        return layer(x if isinstance(x, QuantRows) else quantise_rows(x))
    assert isinstance(x, torch.Tensor), "rows in 8 bits for a layer that is not"
    return layer(x)


def product(x: Rows, layer: Linear) -> torch.Tensor | Parts:
    """layer(x) of x [m, k] for a norm to follow: in parts where that is faster."""
    if isinstance(layer, Fp8Linear) or isinstance(x, QuantRows):
        return _whole(x, layer)
    weight = layer.weight
    is_short = x.is_cuda and weight.dtype.itemsize == 2 and layer.bias is None
    is_cut = is_short and pays(len(x), *weight.shape)
    return product_in_parts(x, weight, NUM_PARTS) if is_cut else layer(x)


def pays(num_rows: int, outputs: int, k: int) -> bool:
    """A product of this form is faster in parts."""
    if k < outputs or k % (NUM_PARTS * _ALIGNED):
        return False
    # Wider ones are enough tiles by themselves, unless there is much to be added up in each.
    most = MOST_CUT_ROWS if outputs <= 4096 else MOST_CUT_ROWS // 2 if k >= 3 * outputs else 0
    return 0 < num_rows <= most


def product_in_parts(x: torch.Tensor, weight: torch.Tensor, num_parts: int) -> Parts:
    """x W^T of x [m, k] and weight [n, k], over num_parts equal parts of k."""
    k = x.shape[1] // num_parts
    a, b = (operand.view(len(operand), num_parts, k).transpose(0, 1) for operand in (x, weight))
    b = b.transpose(1, 2)
    # float32 sums, as the matrix units have them; on the CPU, where kernels are interpreted, by float32 operands.
    out = torch.bmm(a, b, out_dtype=torch.float32) if x.is_cuda else torch.bmm(a.float(), b.float())
    return Parts(out, x.dtype)
