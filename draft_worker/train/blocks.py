"""All blocks of a batch in one forward: context K and V once a sequence, and a mask that says who sees what."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from draft_worker.model import DraftModel
from draft_worker.shape import DraftShape, LayerAttention
from draft_worker.train.batches import Batch
from draft_worker.train.fused_draft import fused_join

_NOTHING = -1
"""A label where there is no token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The blocks of a batch on the device: n sequences of T tokens, A blocks each, B rows a block, k = B - 1."""

    tokens: torch.Tensor
    """int64 [n, T]"""
    anchors: torch.Tensor
    """int64 [n, A]: positions."""
    positions: torch.Tensor
    """int64 [n, A, B]"""
    before: torch.Tensor
    """int64 [n, A, k]: the token before each drafted row's: the anchor, then labels."""
    labels: torch.Tensor
    """int64 [n, A, k]: the answer's token at each drafted row's position; -1 past its end and in blocks that fill up."""

    @property
    def num_blocks(self) -> int:
        """n * A"""
        return self.anchors.numel()


def make_blocks(batch: Batch, block_size: int, device: torch.device) -> Blocks:
    """Blocks at the batch's anchors."""
    tokens, anchors, lens, is_anchor = (
        _sent(part, device) for part in (batch.tokens, batch.anchors, batch.lens, batch.is_anchor)
    )
    positions = anchors[:, :, None] + torch.arange(block_size, device=device)
    inside = positions.clamp(max=tokens.shape[1] - 1)
    found = tokens.gather(1, inside.flatten(1)).view(positions.shape)
    there = (positions < lens[:, None, None]) & is_anchor[:, :, None]
    return Blocks(
        tokens=tokens,
        anchors=anchors,
        positions=positions,
        before=found[:, :, :-1],
        labels=torch.where(there, found, _NOTHING)[:, :, 1:],
    )


def _sent(part: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the device. From pinned memory, so that the host need not wait for the step before."""
    tensor = torch.from_numpy(part)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def block_mask(attention: LayerAttention, blocks: Blocks, dtype: torch.dtype) -> torch.Tensor:
    """Added to the logits, [n, 1, A * B, T + A * B]: 0 where a row sees a key, else -inf.

    A row sees the context strictly before its anchor and the rows of its own block, within its window.
    """
    n, num_blocks, size = blocks.positions.shape
    device = blocks.positions.device
    rows = blocks.positions.flatten(1)
    context = torch.arange(blocks.tokens.shape[1], device=device)
    seen = context < blocks.anchors.repeat_interleave(size, dim=1)[:, :, None]
    if attention.window:
        seen &= rows[:, :, None] - context < attention.window
    distance = torch.arange(size, device=device)[:, None] - torch.arange(size, device=device)
    inside = distance >= 0 if attention.causal else torch.ones_like(distance, dtype=torch.bool)
    if attention.window:
        inside = inside & (distance.abs() < attention.window)
    block = torch.arange(num_blocks, device=device).repeat_interleave(size)
    own = (block[:, None] == block) & inside.repeat(num_blocks, num_blocks)
    mask = torch.zeros((n, rows.shape[1], len(context) + rows.shape[1]), dtype=dtype, device=device)
    return mask.masked_fill_(~torch.cat([seen, own.expand(n, -1, -1)], dim=2), -torch.inf)[:, None]


class BlockAttention:
    """Attention of every block of a batch, in the form that draft_worker.model asks for."""

    def __init__(
        self, shape: DraftShape, blocks: Blocks, context: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
    ) -> None:
        """context: K and V [n * T, L, kv_heads, d] of all tokens, from DraftModel.context."""
        self._shape = shape
        self._blocks = blocks
        # All layers at once, so that their gradients come back in one piece.
        self._context = [part.unflatten(0, blocks.tokens.shape).unbind(2) for part in context]
        made = {kind: block_mask(kind, blocks, dtype) for kind in set(shape.layers)}
        self._masks = [made[kind] for kind in shape.layers]

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> torch.Tensor:
        """See draft_worker.attention.Attend."""
        assert sink is None, "drafters are trained without sinks"
        n, group = len(self._blocks.tokens), self._shape.num_heads // self._shape.num_kv_heads
        # Kernels that take a mask want a kv head for each query head.
        keys, values = (
            fused_join(whole[layer], own.reshape(n, -1, *own.shape[2:]), group)
            for whole, own in zip(self._context, (k, v), strict=True)
        )
        rows = q.reshape(n, -1, *q.shape[2:]).transpose(1, 2)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=self._masks[layer])
        return out.transpose(1, 2).reshape(q.shape)


def block_rows(model: DraftModel, blocks: Blocks, features: torch.Tensor) -> torch.Tensor:
    """Final-normed rows 1..k of all blocks, [n * A, k, H], from the features [n * T, T' * hidden] of all tokens."""
    n, num_tokens = blocks.tokens.shape
    positions = torch.arange(num_tokens, device=features.device).repeat(n)
    context = model.context(features, positions)
    attend = BlockAttention(model.shape, blocks, context, model.dtype)
    first = blocks.before[:, :, 0].flatten()
    return model.rows(first, blocks.positions.flatten(0, 1), attend)[:, 1:]
