"""One linear layer of a model, as the kernels of the gated delta net are launched for it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from memsvc.device.kernels.delta_memory import DeltaMemory


class DeltaTile(NamedTuple):
    """How a head is shared out."""

    columns: int
    """Of the state of a head, v_dim of them, that a program has: a power of two, at least 16."""
    num_warps: int
    piece: int = 64
    """Of k_dim: what the tensor cores get at a time."""
    registers: int | None = None
    """Of a thread, at most; else as many as suit one program by itself."""
    precision: str | None = None
    """Of products on the tensor cores; else by the model's dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSite:
    """One linear layer, as its launches need it."""

    memory: DeltaMemory
    layer: int
    """Its number among the linear layers."""
    conv: torch.Tensor
    """[kernel, conv_dim] float32, the row itself last."""
    tile: DeltaTile | None = None
    """Else delta_verify chooses."""
