"""The route this project argues against, kept to compare with: whole contexts in one packed sequence."""

import numpy as np
import torch
import torch.nn.functional as F

from draft_worker.attention import DraftKv, block_sees
from draft_worker.batch import BlockBatch
from draft_worker.shape import DraftShape, LayerAttention


class MaterializedAttention:
    """Gathers all contexts of all requests into one sequence and attends every row of it.

    Context rows become queries too, under the mask that keeps requests apart, and their outputs are
    dropped: sum over requests of (context + B)^2 instead of B * (context + B). Block rows see
    exactly what they see on the paged route, so the tokens are the same.
    """

    def __init__(self, shape: DraftShape, memory: DraftKv, batch: BlockBatch) -> None:
        self._layers = shape.layers
        self._pool = pool = memory.pool
        self._batch = batch
        self._start = batch.context_start
        if shape.window:
            # Pages below it may be gone.
            self._start = np.minimum(np.maximum(self._start, batch.anchor_pos - shape.window + 1), batch.anchor_pos)
        spans = list(zip(self._start, batch.anchor_pos, strict=True))
        positions = np.concatenate([np.arange(start, end) for start, end in spans])
        rows = np.repeat(batch.rows, [end - start for start, end in spans])
        self._places = pool.split(memory.tables.slots_at(rows, positions))
        self._lens = [int(end - start) for start, end in spans]
        self._masks = {kind: [self._mask(kind, index) for index in range(len(batch))] for kind in set(shape.layers)}

    def _mask(self, kind: LayerAttention, index: int) -> torch.Tensor:
        """bool [C + B, C + B]: what each row of one request sees. Context rows see their whole request."""
        size = self._batch.block_size
        start, end = self._start[index], self._batch.anchor_pos[index]
        seen = np.ones((end - start + size, end - start + size), dtype=bool)
        if kind.window:
            seen[-size:] = self._batch.positions[index][:, None] - np.arange(start, end + size) < kind.window
        seen[-size:, -size:] = block_sees(kind, size)
        return torch.from_numpy(seen).to(self._pool.k(0).device)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> torch.Tensor:
        """See Attend."""
        context_k, context_v = self._pool.rows_at(layer, self._places, k.dtype)
        keys, values = self._pack(context_k, k), self._pack(context_v, v)
        context_rows = q.new_zeros(sum(self._lens), *q.shape[2:])
        queries = self._pack(context_rows, q)
        segments = zip(queries, keys, values, self._masks[self._layers[layer]], strict=True)
        out = [_attend_segment(rows, key, value, mask, sink)[-q.shape[1] :] for rows, key, value, mask in segments]
        return torch.stack(out)

    def _pack(self, context: torch.Tensor, block: torch.Tensor) -> list[torch.Tensor]:
        """One packed sequence of every request's context rows and block rows, as its segments."""
        parts = zip(context.split(self._lens), block, strict=True)
        packed = torch.cat([part for pair in parts for part in pair])
        return list(packed.split([length + block.shape[1] for length in self._lens]))


def _attend_segment(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor | None
) -> torch.Tensor:
    """Attention [rows, heads, d] of one request's rows over themselves."""
    mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)[None, None]
    if sink is not None:
        nothing = torch.zeros_like(k[:1])
        k, v = torch.cat([k, nothing]), torch.cat([v, nothing])
        column = sink.to(q.dtype)[None, :, None, None].expand(-1, -1, len(q), -1)
        mask = torch.cat([mask.expand(-1, q.shape[1], -1, -1), column], dim=3)
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
