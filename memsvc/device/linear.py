"""x W^T with what follows it: cuBLAS, then one kernel of rows, which asks for the next weight ahead of its use."""

from dataclasses import dataclass
from typing import TypeAlias, overload

import torch

from memsvc.device.kernels.mlp import silu_mul
from memsvc.device.kernels.norm import Tap, add_rms_norm
from memsvc.device.layers import Linear, RMSNorm

__all__ = ["AddNorm", "Epilogue", "Gated", "linear"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gated:
    """act(gate) * up; the weight is gate's rows, then up's."""

    act: str = "silu"
    ahead: torch.Tensor | None = None
    """The weight that is multiplied next, for kernels.ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AddNorm:
    """The residual sum, and the norm of it."""

    residual: torch.Tensor
    """[m, n], contiguous. Becomes the sum."""
    norm: RMSNorm
    tap: Tap | None = None
    ahead: torch.Tensor | None = None
    """As Gated's."""


Epilogue: TypeAlias = Gated | AddNorm | None


@overload
def linear(x: torch.Tensor, layer: Linear, epilogue: Gated | None = None) -> torch.Tensor: ...
@overload
def linear(x: torch.Tensor, layer: Linear, epilogue: AddNorm) -> tuple[torch.Tensor, torch.Tensor]: ...
def linear(
    x: torch.Tensor, layer: Linear, epilogue: Epilogue = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """layer(x) of x [m, k]; with Gated, mlp.silu_mul of it; with AddNorm, (normed, residual) as norm.add_rms_norm's."""
    product = layer(x)
    if isinstance(epilogue, AddNorm):
        return add_rms_norm(product, epilogue.residual, epilogue.norm, epilogue.tap, epilogue.ahead)
    return product if epilogue is None else silu_mul(product, epilogue.act, epilogue.ahead)
