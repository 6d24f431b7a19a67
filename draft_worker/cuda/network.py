"""The drafter's step over static tensors: features in, one forward over N x B rows, k tokens for each place.

The same arithmetic as draft_worker.model, rounded where it rounds, with one kernel for whatever lies between two
GEMMs. Nothing reads the device on the host or depends on data, so it runs inside a graph as it does outside.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from draft_worker.attention import Attend
from draft_worker.conv import LocalConv
from draft_worker.cuda.choose import TokenChoice
from draft_worker.cuda.context import write_features
from draft_worker.model import DraftLayer, DraftModel
from memsvc.device.graphs import Places
from memsvc.device.kernels.attention_tiles import AttentionScratch
from memsvc.device.kernels.block_attention import Context, block_attention
from memsvc.device.kernels.context_write import ContextRows
from memsvc.device.kernels.conv import ConvTaps, conv_finish_add_rms_norm, conv_prepare
from memsvc.device.kernels.embed import embed_block, gather_features, gather_rows
from memsvc.device.kernels.heads import HeadSpec, rotate_heads
from memsvc.device.kernels.norm import rms_norm
from memsvc.device.kernels.places import BlockRows
from memsvc.device.kv_pool import KvPool
from memsvc.device.layers import Linear, RMSNorm
from memsvc.device.linear import AddNorm, Gated, linear
from memsvc.device.slots import SlotState

MEM, FWD, HEAD, SELECT = "mem", "fwd", "head", "select"
SECTIONS: tuple[str, ...] = (MEM, FWD, HEAD, SELECT)
"""What a step consists of: features into draft KV, embedding and layers, output head, token choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftMemory:
    """What a step reads and writes. Graphs hold these tensors, so they stay where they are."""

    pool: KvPool
    """Draft KV."""
    page_table: torch.Tensor
    """int32 [num_slots + 1, max_pages]"""
    slots: SlotState
    """In the exchange, shared with the target."""
    features: torch.Tensor
    """[rows, T * target hidden], in the exchange."""


MakeAttend = Callable[[Places], Attend]
"""Another route's attention for one step, instead of the block kernel. Called once the step's features are written,
it may read the device."""


class DraftStep:
    """The step for blocks of 1 + num_drafts rows."""

    def __init__(self, model: DraftModel, memory: DraftMemory, num_drafts: int, buckets: tuple[int, ...]) -> None:
        """buckets: batch sizes that are expected; larger ones are served with a scratch of their own."""
        self._model = model
        self._memory = memory
        self._head = Linear(model.head)
        self._block_size = 1 + num_drafts
        self._layers = [_heads_of(layer, model) for layer in model.layers]
        self._choice = TokenChoice(model, memory.slots, num_drafts)
        self._largest = max(buckets, default=1)
        self._scratch = self._scratch_for(self._largest)

    @property
    def dtype(self) -> torch.dtype:
        """Of rows; draft KV may be e4m3."""
        return self._model.dtype

    def _scratch_for(self, num_places: int) -> AttentionScratch:
        shape = self._model.shape
        return AttentionScratch.for_buckets(
            (num_places,),
            self._block_size,
            (shape.num_heads, shape.num_kv_heads),
            shape.head_dim,
            self._memory.features.device,
        )

    def absorb(self, places: Places) -> None:
        """K and V of all layers for the tokens that each member's newest verify made final: num_rows of them."""
        memory, slots, size = self._memory, self._memory.slots, self._block_size
        features = gather_features(memory.features, places.members, slots.feature_row, slots.num_rows, size)
        rows = ContextRows(
            members=places.members,
            num_rows=slots.num_rows,
            block_size=size,
            page_table=memory.page_table,
            starts=slots.feature_start,
        )
        write_features(self._model, memory.pool, features, rows)

    def run(self, places: Places, make_attend: MakeAttend | None = None) -> Iterator[str]:
        """A Turn of memsvc.device.graphs: sections SECTIONS. places.numbers: how many drafts shall count."""
        self.absorb(places)
        yield MEM
        attend = self._attend(places) if make_attend is None else make_attend(places)
        z = self._rows(places, attend)
        yield FWD
        logits = linear(z, self._head)
        yield HEAD
        self._choice.choose(places, z, logits)
        yield SELECT

    def _attend(self, places: Places) -> Attend:
        memory, pool, layers = self._memory, self._memory.pool, self._model.shape.layers
        context = Context(memory.page_table, places.members, memory.slots.valid_from, memory.slots.length)
        scratch = self._scratch if places.size <= self._largest else self._scratch_for(places.size)

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
        ) -> torch.Tensor:
            kind = layers[layer]
            return block_attention(
                q, k, v, pool.k(layer), pool.v(layer), context,
                causal=kind.causal, window=kind.window, scratch=scratch, sink=sink,
            )  # fmt: skip

        return attend

    def _rows(self, places: Places, attend: Attend) -> torch.Tensor:
        """Final-normed rows 1..k of every place, [N * k, H]."""
        model, slots, size = self._model, self._memory.slots, self._block_size
        scale = model.shape.input_embedding_scale
        x = embed_block(slots.anchor, places.members, model.embedding, model.mask_row, size, scale).flatten(0, 1)
        rows = BlockRows(members=places.members, lengths=slots.length, block_size=size)
        layers = model.layers
        u = rms_norm(x, layers[0].input_norm)
        for index, layer in enumerate(layers):
            is_last = index + 1 == len(layers)
            norm = model.norm if is_last else layers[index + 1].input_norm
            taps, u = self._prepare(layer.attention_conv, u)
            out = self._attention(index, u, rows, attend)
            u, x = self._finish(out, layer.out, taps, AddNorm(residual=x, norm=layer.post_norm))
            taps, u = self._prepare(layer.mlp_conv, u)
            gated = linear(u, layer.mlp.gate_up, Gated())
            u, x = self._finish(gated, layer.mlp.down, taps, AddNorm(residual=x, norm=norm), skip=int(is_last))
        return u

    def _attention(self, index: int, u: torch.Tensor, rows: BlockRows, attend: Attend) -> torch.Tensor:
        """What the layer's output projection multiplies."""
        layer, size = self._model.layers[index], self._block_size
        heads = rotate_heads(linear(u, layer.qkv), rows, self._layers[index])
        q, k, v = (part.view(-1, size, *part.shape[1:]) for part in heads)
        return attend(index, q, k, v, layer.sink).reshape(len(u), -1)

    def _prepare(self, conv: LocalConv | None, u: torch.Tensor) -> tuple[ConvTaps | None, torch.Tensor]:
        if conv is None:
            return None, u
        taps = ConvTaps(base=conv.base_kernel, dynamic=linear(u, conv.projection), block_size=self._block_size)
        return taps, conv_prepare(u, taps)

    def _finish(
        self, out: torch.Tensor, layer: Linear, taps: ConvTaps | None, ending: AddNorm, skip: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed residual + layer's product, without the first `skip` rows of a block; the new residual)."""
        if taps is not None:
            y = linear(out, layer)
            return conv_finish_add_rms_norm(y, taps, ending.residual, ending.norm, skip)
        normed, residual = linear(out, layer, ending)
        if skip:
            normed = gather_rows(normed.view(-1, self._block_size, normed.shape[1]), skip)
        return normed, residual


def _heads_of(layer: DraftLayer, model: DraftModel) -> HeadSpec:
    shape, weight, eps = model.shape, layer.qk_norm.weight, layer.qk_norm.eps
    return HeadSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rotary=model.rotary,
        # One row for each head there, all query heads' the same and all key heads' the same.
        q_norm=RMSNorm(weight[0], eps),
        k_norm=RMSNorm(weight[-1], eps),
        value_scale=shape.attention_value_scale,
    )
