"""A draft layer in training, in pieces before and after attention, one compiled function a piece."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from draft_worker.attention import Attend
from draft_worker.conv import LocalConv, finish
from draft_worker.model import DraftLayer, Tables
from memsvc.device.layers import GatedMlp, Linear, RMSNorm, Rotary
from target_worker.train.fused import Fused

Taps = torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedDraftLayer(DraftLayer):
    """A DraftLayer without bias, sink and scales, that computes the same in fewer kernels."""

    def forward(self, index: int, x: torch.Tensor, rotary: Rotary, tables: Tables, attend: Attend) -> torch.Tensor:
        """See DraftLayer."""
        shape = self.shape
        assert self.sink is None, "drafters are trained without sinks"
        assert shape.attention_value_scale == 1.0, f"values are scaled by {shape.attention_value_scale}"
        # The first layer's rows come from a frozen embedding; with a gradient they are a call like the others'.
        if torch.is_grad_enabled() and self.qkv.weight.requires_grad and not x.requires_grad:
            x = x.detach().requires_grad_()
        weights = (self.input_norm.weight, *_conv(self.attention_conv), self.qkv.weight, self.qk_norm.weight)
        qk, v, taps = _enter(x, *tables, self.input_norm.eps, rotary, *weights)
        q, k = qk.split((shape.num_heads, shape.num_kv_heads), dim=2)
        out = attend(index, q, k, v, None).flatten(2)
        weights = (self.out.weight, self.post_norm.weight, *_conv(self.mlp_conv))
        return _leave(out, x, taps, self.post_norm.eps, *weights, self.mlp.gate_up.weight, self.mlp.down.weight)


class FusedNorm(RMSNorm):
    """RMSNorm in one kernel."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _norm(x, self.eps, self.weight)


def _conv(conv: LocalConv | None) -> tuple[Taps, Taps]:
    return (None, None) if conv is None else (conv.base_kernel, conv.projection.weight)


def _prepared(u: torch.Tensor, base: Taps, projection: Taps) -> tuple[torch.Tensor, Taps]:
    if base is None or projection is None:
        return u, None
    return LocalConv(base, Linear(projection)).prepare(u)


def _finished(y: torch.Tensor, taps: Taps) -> torch.Tensor:
    return y if taps is None else finish(y, taps)


def enter_layer(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, rotary: Rotary, *weights: Any
) -> tuple[torch.Tensor, torch.Tensor, Taps]:
    """(q and k, rotated, [n, B, heads + kv_heads, d]; v [n, B, kv_heads, d]; taps of the output) of x [n, B, H]."""
    norm, base, projection, qkv, qk_norm = weights
    n, num_rows, _ = x.shape
    u, taps = _prepared(RMSNorm(norm, eps)(x), base, projection)
    taps = None if taps is None else taps.contiguous()
    num_qk, dim = qk_norm.shape
    heads = F.linear(u.flatten(0, 1), qkv).view(n * num_rows, -1, dim)
    qk = rotary.rotate(RMSNorm(qk_norm, eps)(heads[:, :num_qk]), (cos, sin))
    return qk.view(n, num_rows, num_qk, dim), heads[:, num_qk:].view(n, num_rows, -1, dim), taps


def leave_layer(out: torch.Tensor, x: torch.Tensor, taps: Taps, eps: float, *weights: Any) -> torch.Tensor:
    """x [n, B, H] after a layer, of attention's output [n, B, heads * d] and x before the layer."""
    o, norm, base, projection, gate_up, down = weights
    x = x + _finished(F.linear(out.flatten(0, 1), o).view_as(x), taps)
    u, mlp_taps = _prepared(RMSNorm(norm, eps)(x), base, projection)
    mlp = GatedMlp(Linear(gate_up), Linear(down), F.silu)
    return x + _finished(mlp(u.flatten(0, 1)).view_as(x), mlp_taps)


def normed(x: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    """What RMSNorm computes."""
    return RMSNorm(weight, eps)(x)


def join(context: torch.Tensor, own: torch.Tensor, group: int) -> torch.Tensor:
    """[n, kv_heads * group, T + R, d] of K or V [n, T, kv_heads, d] and [n, R, kv_heads, d], one for each query head."""
    return torch.cat([context, own], dim=1).transpose(1, 2).repeat_interleave(group, dim=1)


fused_join = Fused(join, moving=2, dims=2)
_enter, _leave, _norm = Fused(enter_layer, moving=3), Fused(leave_layer, moving=3), Fused(normed, moving=1)
