"""The DFlash and DFlash2 network over n x B block rows, and the context K and V it makes of features."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from draft_worker.attention import Attend
from draft_worker.borrowed import LateRows
from draft_worker.conv import LocalConv, finish
from draft_worker.selector import CandidateSelector
from draft_worker.shape import DraftShape
from memsvc.device.layers import GatedMlp, Linear, RMSNorm, Rotary

Tables = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of a forward's positions, from Rotary.tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLayer:
    """One pre-norm layer. q, k and v are one matrix, and q and k are normed and rotated as one set of heads."""

    shape: DraftShape
    input_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm
    """weight [heads + kv_heads, d]"""
    out: Linear
    post_norm: RMSNorm
    mlp: GatedMlp
    attention_conv: LocalConv | None
    mlp_conv: LocalConv | None
    sink: torch.Tensor | None
    """[heads]"""

    def forward(self, index: int, x: torch.Tensor, rotary: Rotary, tables: Tables, attend: Attend) -> torch.Tensor:
        """x [n, B, H] after layer `index`."""
        u, taps = _prepare(self.attention_conv, self.input_norm(x))
        x = x + _finish(self._attention(index, u, rotary, tables, attend), taps)
        u, taps = _prepare(self.mlp_conv, self.post_norm(x))
        return x + _finish(self.mlp(u.flatten(0, 1)).view_as(u), taps)

    def _attention(self, index: int, u: torch.Tensor, rotary: Rotary, tables: Tables, attend: Attend) -> torch.Tensor:
        n, num_rows, _ = u.shape
        num_heads, num_qk = self.shape.num_heads, self.shape.num_heads + self.shape.num_kv_heads
        heads = self.qkv(u.flatten(0, 1)).view(n * num_rows, -1, self.shape.head_dim)
        qk = rotary.rotate(self.qk_norm(heads[:, :num_qk]), tables).view(n, num_rows, num_qk, -1)
        v = _times(heads[:, num_qk:], self.shape.attention_value_scale).view(n, num_rows, -1, self.shape.head_dim)
        out = attend(index, qk[:, :, :num_heads], qk[:, :, num_heads:], v, self.sink)
        return self.out(out.view(n * num_rows, -1)).view_as(u)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModel:
    """All weights of a drafter, with the target's embedding and head."""

    shape: DraftShape
    layers: tuple[DraftLayer, ...]
    rotary: Rotary
    feature_proj: Linear
    """fc: [H, T * target hidden]"""
    feature_norm: RMSNorm
    context_kv: Linear
    """K and V projections of all layers on top of each other: [L * 2 * kv_heads * d, H]."""
    context_k_norm: RMSNorm
    """weight [L, 1, d]"""
    norm: RMSNorm
    embedding: torch.Tensor
    """[V, H], the target's."""
    mask_row: torch.Tensor
    """[H]: embedding under rows 1 and on, not scaled yet."""
    head: torch.Tensor
    """[draft V, H]"""
    draft_to_target: torch.Tensor | None
    """int64 [draft V]: token id of each head row; None if it is the row's number."""
    selector: CandidateSelector | None
    late: list[LateRows] = field(default_factory=list)
    """Copies of rows that the target fills while this model loads; empty if it was read from files."""

    def fill_late(self) -> None:
        """Take over what the target has filled: it says so by DraftHello. Tensors stay where they are."""
        for rows in self.late:
            rows.fill()

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.head.dtype

    def rows(self, anchors: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Final-normed rows [n, B, H] of blocks with these anchors int64 [n] at positions int64 [n, B]."""
        x = _times(self.mask_row, self.shape.input_embedding_scale).repeat(*positions.shape, 1)
        x[:, 0] = _times(F.embedding(anchors, self.embedding), self.shape.input_embedding_scale)
        tables = self.rotary.tables(positions.flatten(), self.dtype)
        for index, layer in enumerate(self.layers):
            x = layer.forward(index, x, self.rotary, tables, attend)
        return self.norm(x)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Raw head logits [draft V, m] of rows [m, H]; multiplier and softcap come after it.

        With the long matrix first, CPU kernels read it without repacking: 2.7 ms instead of 7.0 for 7
        rows of a 49,152 x 576 bfloat16 head on one thread, and the same bits.
        """
        return self.head @ rows.t()

    def token_ids(self, head_rows: torch.Tensor) -> torch.Tensor:
        """Token ids of rows of the head."""
        return head_rows if self.draft_to_target is None else self.draft_to_target[head_rows]

    def context(self, features: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [N, L, kv_heads, d] of N context tokens, from features [N, T * target hidden] and positions [N]."""
        shape = self.shape
        num = len(positions)
        c = self.feature_norm(self.feature_proj(features.to(self.dtype)))
        kv = self.context_kv(c).view(num, shape.num_layers, 2, shape.num_kv_heads, shape.head_dim)
        k = self.context_k_norm(kv[:, :, 0])
        k = self.rotary.rotate(k.flatten(1, 2), self.rotary.tables(positions, self.dtype)).view(k.shape)
        return k, _times(kv[:, :, 1], shape.attention_value_scale)


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


def _prepare(conv: LocalConv | None, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (u, None) if conv is None else conv.prepare(u)


def _finish(y: torch.Tensor, taps: torch.Tensor | None) -> torch.Tensor:
    return y if taps is None else finish(y, taps)
