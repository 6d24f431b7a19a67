"""Weights laid out for the CPU's matrix units. The only place that calls torch's oneDNN operators by name."""

# They carry an underscore, though torch's own compiler emits them: is_packable asks whether they are there.
# ruff: noqa: SLF001

import torch

_ROWS = 32
"""Batch the layout is chosen for; others run as well with it."""


def is_packable(weight: torch.Tensor) -> bool:
    """This build and CPU have a faster layout for the weight."""
    if weight.device.type != "cpu" or weight.layout != torch.strided or not torch.backends.mkldnn.is_available():
        return False
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    if not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight [out, in] in that layout: opaque, without views or indexing."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [n, in] times a packed weight, plus bias."""
    if x.shape[0] == 0:  # refused by oneDNN
        return x.new_empty(0, weight.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
