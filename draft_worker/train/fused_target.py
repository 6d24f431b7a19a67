"""The target's layers in two pieces each, before and after attention, one compiled function a piece."""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F

from memsvc.device.fp8 import Fp8Linear
from memsvc.device.layers import GatedMlp, Linear, RMSNorm
from target_worker.model.decoder import Attend, Decoder, DecoderLayer, Tap
from target_worker.model.delta_layer import Recur
from target_worker.train.fused import Fused


@dataclass(frozen=True, slots=True)
class FusedDecoder(Decoder):
    """A Decoder of plain layers that computes the same in fewer kernels."""

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        tap: Tap | None = None,
        recur: Recur | None = None,
    ) -> torch.Tensor:
        """See Decoder."""
        assert recur is None, "all layers attend"
        x = F.embedding(token_ids, self.embedding)
        cos, sin = self.rotary.tables(positions, x.dtype)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            qk, v = _enter(x, cos, sin, self, layer.input_norm.eps, *_entering(layer))
            out = attend(index, qk[:, : self.shape.num_heads], qk[:, self.shape.num_heads :], v)
            x = _leave(out, x, layer.mlp.act, layer.post_norm.eps, *_leaving(layer))
            if tap is not None:
                tap(index, x)
        return x


def fuse(model: Decoder) -> Decoder:
    """The same network in fewer kernels; the network itself if it is on a CPU or not all of its layers are plain."""
    if model.device.type == "cpu" or not all(is_plain(layer) for layer in model.layers):
        return model
    return fused(model)


def fused(model: Decoder) -> FusedDecoder:
    """The same network, whose layers must be plain."""
    return FusedDecoder(**{field.name: getattr(model, field.name) for field in fields(Decoder)})


def is_plain(layer: object) -> bool:
    """Norm, attention without a gate, norm, MLP, and weights in floats."""
    if not isinstance(layer, DecoderLayer) or layer.is_gated or type(layer.input_norm) is not RMSNorm:
        return False
    return not any(isinstance(x, Fp8Linear) for x in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down))


def _entering(layer: DecoderLayer) -> tuple[torch.Tensor | None, ...]:
    q_norm, k_norm = (None if norm is None else norm.weight for norm in (layer.q_norm, layer.k_norm))
    return (layer.input_norm.weight, layer.qkv.weight, layer.qkv.bias, q_norm, k_norm)


def _leaving(layer: DecoderLayer) -> tuple[torch.Tensor | None, ...]:
    linears = (layer.o, layer.mlp.gate_up, layer.mlp.down)
    return (layer.post_norm.weight, *(part for linear in linears for part in (linear.weight, linear.bias)))


def enter_layer(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, model: Decoder, eps: float, *weights: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q and k, rotated, [n, heads + kv_heads, d]; v [n, kv_heads, d]) of the residual stream x [n, hidden]."""
    norm, qkv, bias, q_norm, k_norm = weights
    num_heads, num_qk = model.shape.num_heads, model.shape.num_heads + model.shape.num_kv_heads
    heads = F.linear(RMSNorm(norm, eps)(x), qkv, bias).view(x.shape[0], -1, model.shape.head_dim)
    qk = heads[:, :num_qk]
    if q_norm is not None:
        qk = torch.cat((RMSNorm(q_norm, eps)(qk[:, :num_heads]), RMSNorm(k_norm, eps)(qk[:, num_heads:])), dim=1)
    return model.rotary.rotate(qk, (cos, sin)), heads[:, num_qk:]


def leave_layer(out: torch.Tensor, x: torch.Tensor, act: Any, eps: float, *weights: Any) -> torch.Tensor:
    """The residual stream [n, hidden] after a layer, of attention's output [n, heads * d] and the stream before it."""
    norm, o, o_bias, gate_up, gate_up_bias, down, down_bias = weights
    x = x + F.linear(out, o, o_bias)
    return x + GatedMlp(Linear(gate_up, gate_up_bias), Linear(down, down_bias), act)(RMSNorm(norm, eps)(x))


_enter, _leave = Fused(enter_layer, moving=3, frozen=True), Fused(leave_layer, moving=2, frozen=True)
