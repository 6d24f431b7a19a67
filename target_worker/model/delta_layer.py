"""A gated delta net layer, without its memory: what it projects, and what it does with the recurrence's output."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from memsvc.device.layers import GatedMlp, GatedRMSNorm, Linear, RMSNorm
from target_worker.model.linear_spec import LinearSpec


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What n rows bring to the recurrence: all that a ring has to keep of them."""

    raw: torch.Tensor
    """Queries, keys and values before the convolution, [n, conv_dim] in the model's dtype."""
    gates: torch.Tensor
    """g and beta, [n, 2, v_heads] float32."""

    @classmethod
    def none(cls, spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> "DeltaInputs":
        """No rows."""
        raw = torch.empty((0, spec.conv_dim), dtype=dtype, device=device)
        return cls(raw, torch.empty((0, 2, spec.num_v_heads), device=device))


Recur = Callable[[int, torch.Tensor, DeltaInputs], torch.Tensor]
"""recur(number among the linear layers, conv [kernel, conv_dim] float32, rows) -> [n, v_heads, v_dim] float32."""


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """Weights of one layer. proj is one matrix: queries, keys, values, then the output gate z, then b, then a.

    b and a have gate_width rows, zeros past the heads; so have rate and dt_bias.
    """

    spec: LinearSpec
    input_norm: RMSNorm
    proj: Linear
    conv: torch.Tensor
    """[kernel, conv_dim] float32, the row itself last."""
    rate: torch.Tensor
    """-exp(A_log), [gate_width] float32."""
    dt_bias: torch.Tensor
    """[gate_width] float32"""
    norm: GatedRMSNorm
    o: Linear
    post_norm: RMSNorm
    mlp: GatedMlp

    def mix(self, index: int, x: torch.Tensor, recur: Recur) -> torch.Tensor:
        """The layer's part of the residual stream [n, hidden], of rows x [n, hidden] already normed."""
        spec = self.spec
        sizes = [spec.conv_dim, spec.value_size, spec.gate_width, spec.gate_width]
        raw, z, b, a = self.proj(x).split(sizes, dim=-1)
        g = self.rate * F.softplus(a.float() + self.dt_bias)
        gates = torch.stack((g, b.float().sigmoid()), dim=1)[..., : spec.num_v_heads]
        out = recur(index, self.conv, DeltaInputs(raw, gates))
        gate = z.reshape(-1, spec.num_v_heads, spec.v_dim)
        return self.o(self.norm.gated(out, gate).flatten(1))
