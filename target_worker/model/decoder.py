"""The decoder: Llama, Qwen2 and Qwen3 differ in biases and in the norm of q and k, nothing else.

The hybrids gate the output of attention, and have gated delta net layers in its stead (delta_layer.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from memsvc.device.layers import GatedMlp, Linear, RMSNorm
from memsvc.device.rope import Rotary
from target_worker.model.config import TargetShape
from target_worker.model.delta_layer import DeltaLayer, Recur

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q [n, heads, d], k [n, kv_heads, d], v) -> [n, heads * d]; it also stores k and v.

layer is the number among the layers with attention."""

Tap = Callable[[int, torch.Tensor], None]
"""tap(layer, x [n, hidden]): the residual stream after that layer. x is overwritten later: copy it."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. qkv is one matrix: all q heads, then k, then v, then (if it is gated) a gate a q head."""

    input_norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: Linear
    post_norm: RMSNorm
    mlp: GatedMlp
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class Decoder:
    """The network without its memory: attention over earlier tokens is passed in."""

    shape: TargetShape
    embedding: torch.Tensor
    """[vocab, hidden]"""
    layers: list[DecoderLayer | DeltaLayer]
    norm: RMSNorm
    head: Linear
    rotary: Rotary

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def delta_layers(self) -> list[DeltaLayer]:
        """The layers with a recurrent state."""
        return [layer for layer in self.layers if isinstance(layer, DeltaLayer)]

    @property
    def matrices(self) -> list[Linear]:
        """Of all layers, as they come: into attention or the recurrence, out of it, into the MLP, out of it."""
        firsts = [layer.proj if isinstance(layer, DeltaLayer) else layer.qkv for layer in self.layers]
        return [
            matrix
            for first, layer in zip(firsts, self.layers, strict=True)
            for matrix in (first, layer.o, layer.mlp.gate_up, layer.mlp.down)
        ]

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        tap: Tap | None = None,
        recur: Recur | None = None,
    ) -> torch.Tensor:
        """Residual stream [n, hidden] after all layers, before the final norm, of n tokens (int64 [n] each).

        recur: needed if there are layers with a recurrent state.
        """
        x = F.embedding(token_ids, self.embedding)
        tables = self.rotary.tables(positions, x.dtype)
        num_full = num_linear = 0
        for i, layer in enumerate(self.layers):
            if isinstance(layer, DeltaLayer):
                assert recur is not None, f"layer {i} is recurrent"
                mixed = layer.mix(num_linear, layer.input_norm(x), recur)
                num_linear += 1
            else:
                mixed = self._attention(num_full, layer, layer.input_norm(x), attend, tables)
                num_full += 1
            x += layer.mlp(layer.post_norm.after(x, mixed))
            if tap is not None:
                tap(i, x)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[m, vocab] in the model's dtype, of rows x [m, hidden] of `hidden`."""
        return self.head(self.norm(x))

    def _attention(
        self,
        index: int,
        layer: DecoderLayer,
        x: torch.Tensor,
        attend: Attend,
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        qkv = layer.qkv(x).view(x.shape[0], -1, self.shape.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads : heads + 2 * kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat((layer.q_norm(qk[:, :heads]), layer.k_norm(qk[:, heads:])), dim=1)
        qk = self.rotary.rotate(qk, tables)
        out = attend(index, qk[:, :heads], qk[:, heads:], v)
        if layer.is_gated:
            out *= torch.sigmoid(qkv[:, heads + 2 * kv_heads :]).flatten(1)
        return layer.o(out)
