"""x W^T with what follows it, by cuBLAS and a row kernel or by one of skinny_gemm: a table says which.

Both give the same values but for the order in which float32 sums are added up; skinny_gemm says what that means.
"""

from dataclasses import dataclass
from typing import TypeAlias, overload

import torch

from memsvc.device import linear_table
from memsvc.device.kernels.mlp import silu_mul
from memsvc.device.kernels.norm import Tap, add_rms_norm
from memsvc.device.kernels.skinny_gemm import DTYPES, skinny_gated, skinny_linear, skinny_parts
from memsvc.device.kernels.skinny_norm import sum_add_rms_norm
from memsvc.device.kernels.skinny_tiles import SkinnyPlan
from memsvc.device.layers import Linear, RMSNorm, ZeroCentredRMSNorm

__all__ = ["GATED", "NORM", "PLAIN", "AddNorm", "Epilogue", "Gated", "apply", "choices", "ending", "linear", "plan_for"]

PLAIN, GATED, NORM = "plain", "gated", "norm"
"""Endings: nothing but a bias, Gated, AddNorm."""

choices: linear_table.Choices = linear_table.CHOICES
"""What `linear` goes by. Set before anything is captured: {} is cuBLAS everywhere."""


@dataclass(frozen=True, slots=True)
class Gated:
    """act(gate) * up: the weight is gate's rows, then up's."""

    act: str = "silu"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddNorm:
    """The residual sum, and the norm of it."""

    residual: torch.Tensor
    """[m, n], contiguous. Becomes the sum."""
    norm: RMSNorm
    tap: Tap | None = None


Epilogue: TypeAlias = Gated | AddNorm | None


def ending(epilogue: Epilogue) -> str:
    """PLAIN, GATED or NORM."""
    return PLAIN if epilogue is None else GATED if isinstance(epilogue, Gated) else NORM


@overload
def linear(x: torch.Tensor, layer: Linear, epilogue: Gated | None = None) -> torch.Tensor: ...
@overload
def linear(x: torch.Tensor, layer: Linear, epilogue: AddNorm) -> tuple[torch.Tensor, torch.Tensor]: ...
def linear(
    x: torch.Tensor, layer: Linear, epilogue: Epilogue = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """layer(x) of x [m, k]; with Gated, mlp.silu_mul of it; with AddNorm, (normed, residual) as norm.add_rms_norm's.

    May be captured, if the same call was made once before.
    """
    return apply(plan_for(x, layer, epilogue), x, layer, epilogue)


def plan_for(x: torch.Tensor, layer: Linear, epilogue: Epilogue) -> SkinnyPlan | None:
    """What the table says; None is cuBLAS, and so is whatever skinny_gemm can't multiply."""
    if layer.is_packed or x.dtype not in DTYPES or layer.weight.dtype != x.dtype:
        return None
    n, k = layer.weight.shape
    entries = choices.get((ending(epilogue), n, k), ())
    return next((plan for most, plan in entries if len(x) <= most), None)


def apply(
    plan: SkinnyPlan | None, x: torch.Tensor, layer: Linear, epilogue: Epilogue
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`linear` under a plan of the caller's choice."""
    if isinstance(epilogue, AddNorm):
        norm = epilogue.norm
        facts = norm.weight, norm.eps, isinstance(norm, ZeroCentredRMSNorm)
        if plan is None:
            return add_rms_norm(layer(x), epilogue.residual, *facts, epilogue.tap)
        return sum_add_rms_norm(skinny_parts(x, layer.weight, plan), layer.bias, epilogue.residual, facts, epilogue.tap)
    if isinstance(epilogue, Gated):
        if plan is None:
            return silu_mul(layer(x), epilogue.act)
        return skinny_gated(x, layer.weight, layer.bias, epilogue.act, plan)
    return layer(x) if plan is None else skinny_linear(x, layer.weight, layer.bias, plan)
