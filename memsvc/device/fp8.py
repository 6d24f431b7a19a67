"""Matrices and rows in fp8: e4m3 with one float32 scale a row, and products of both.

A row is divided by its scale, its largest magnitude over 448, rounded to the nearest e4m3 and cut off there. A row that
holds NaN or an infinity becomes NaN. The product is the sum of products of e4m3, which is float32, times both scales,
plus the bias, rounded once. On a CUDA device one call of cuBLAS or CUTLASS does it, on the CPU, where it is what tests
compare with and no way to serve, three steps in float32.
"""

# torch has no other name for the product.
# ruff: noqa: SLF001
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from memsvc.device.layers import Linear

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3."""
LEAST_PEAK = 2.0**-100
"""A row whose largest magnitude is less is scaled as if it were this: scales are normal, and their inverses finite."""
MULTIPLE = 16
"""The device multiplies matrices whose sizes are multiples of it."""
_CHUNK_ROWS = 4096
"""Rows of a matrix rounded at once: there are float32 copies of them."""


@dataclass(frozen=True, slots=True)
class QuantRows:
    """Rows in e4m3 and their scales."""

    values: torch.Tensor
    """e4m3 [n, k], contiguous"""
    scales: torch.Tensor
    """float32 [n, 1], contiguous"""
    dtype: torch.dtype
    """What the rows were in; a product is given in it."""

    def floats(self) -> torch.Tensor:
        """What they stand for, float32."""
        return self.values.float() * self.scales

    def index_select(self, dim: int, index: torch.Tensor) -> "QuantRows":
        """Some of the rows, as a tensor's method has it; dim is 0."""
        assert dim == 0, f"rows are chosen, not dimension {dim}"
        values = self.values.view(torch.uint8).index_select(0, index).view(E4M3)
        return QuantRows(values, self.scales.index_select(0, index), self.dtype)


Rows: TypeAlias = torch.Tensor | QuantRows


def quantise(x: torch.Tensor) -> QuantRows:
    """x [n, k] in 8 bits. What kernels give, to the bit."""
    wide = x.float()
    peak = wide.abs().amax(dim=1, keepdim=True).clamp_min(LEAST_PEAK)
    # Of tensors: a quotient with a number may be a product with its inverse.
    most = torch.full_like(peak, LARGEST)
    values = (wide * (most / peak)).clamp_(-LARGEST, LARGEST).to(E4M3)
    return QuantRows(values, peak / most, x.dtype)


def quantise_weight(weight: torch.Tensor, dtype: torch.dtype) -> QuantRows:
    """weight [out, in] in 8 bits, for products in dtype. Raises ValueError if it is not finite."""
    values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    scales = torch.empty((len(weight), 1), device=weight.device)
    for start in range(0, len(weight), _CHUNK_ROWS):
        rows = quantise(weight[start : start + _CHUNK_ROWS])
        values[start : start + _CHUNK_ROWS], scales[start : start + _CHUNK_ROWS] = rows.values, rows.scales
    wrong = int((~scales.isfinite()).sum())
    if wrong:
        raise ValueError(f"{wrong} rows hold weights that are not finite")
    return QuantRows(values, scales, dtype)


def arrange(made: Callable[..., torch.Tensor], *parts: Rows) -> Rows:
    """made(*parts), which moves whole rows, of matrices that are all in 8 bits or none of them."""
    quantised = [part for part in parts if isinstance(part, QuantRows)]
    if not quantised:
        return made(*parts)
    assert len(quantised) == len(parts), f"{len(quantised)} of {len(parts)} parts are in 8 bits"
    values = made(*(part.values.view(torch.uint8) for part in quantised)).view(E4M3)
    return QuantRows(values.contiguous(), made(*(part.scales for part in quantised)).contiguous(), quantised[0].dtype)


class Fp8Linear(Linear):
    """x W^T + b with a weight in 8 bits; x [n, in] is rounded to 8 bits too, unless it is already."""

    def __init__(self, rows: QuantRows, bias: torch.Tensor | None = None) -> None:
        """rows: the weight [out, in]. Raises ValueError if the device cannot multiply one of that size."""
        super().__init__(rows.values, bias)
        self.scales = rows.scales
        if rows.values.is_cuda and any(size % MULTIPLE for size in rows.values.shape):
            raise ValueError(f"it is {list(rows.values.shape)}, fp8 on a CUDA device needs multiples of {MULTIPLE}")

    def __call__(self, x: Rows) -> torch.Tensor:
        rows = x if isinstance(x, QuantRows) else quantise(x)
        if not len(rows.values):
            return torch.empty((0, len(self.weight)), dtype=rows.dtype, device=self.weight.device)
        if rows.values.is_cuda:
            return self._on_device(rows)
        out = (rows.values.float() @ self.weight.float().t()) * rows.scales * self.scales.t()
        return (out if self.bias is None else out + self.bias.float()).to(rows.dtype)

    def _on_device(self, rows: QuantRows) -> torch.Tensor:
        # b is to be column-major, as the transposed view is; scales a row are given in bfloat16 and nothing else.
        out = torch._scaled_mm(
            rows.values, self.weight.t(), scale_a=rows.scales, scale_b=self.scales.t(), bias=self.bias,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
        return out.to(rows.dtype)

    def pack(self) -> "Fp8Linear":
        """There is no other layout; returns self."""
        return self


def made_linear(weight: Rows, bias: torch.Tensor | None) -> Linear:
    """The layer of a weight in whatever it is."""
    return Fp8Linear(weight, bias) if isinstance(weight, QuantRows) else Linear(weight, bias).pack()
