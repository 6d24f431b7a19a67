"""The target's forward over static tensors: blocks to verify inside a graph, prompt chunks outside.

The same arithmetic as target_worker.model.decoder, rounded where it rounds, with one kernel for whatever lies between
two GEMMs. Of a block nothing is read on the host, lengths and tokens neither.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from memsvc.device.fp8 import Rows as LayerRows
from memsvc.device.kernels.attention_tiles import AttentionScratch
from memsvc.device.kernels.block_attention import Context, block_attention
from memsvc.device.kernels.delta_gates import delta_gates, gated_norm
from memsvc.device.kernels.heads import HeadSpec, rotate_heads_into_pages
from memsvc.device.kernels.norm import Tap
from memsvc.device.kernels.places import Rows
from memsvc.device.kv_pool import KvPool
from memsvc.device.layers import Linear
from memsvc.device.linear import AddNorm, Gated, gate_for, linear, linear_for, norm_for
from memsvc.device.slots import SlotState
from target_worker.cuda.states import DeviceStates
from target_worker.model.decoder import Decoder, DecoderLayer
from target_worker.model.delta_layer import DeltaLayer

AttendRows = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q [n, heads, d], k [n, kv_heads, d], v) -> [n, heads, d]. k and v are in the pages already.

layer is the number among the layers with attention."""


class RecurRows(Protocol):
    """The recurrences of some rows of a hybrid target's forward."""

    def __call__(self, layer: int, raw: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Outputs [n, v_heads, v_dim], of any dtype. layer is the number among the linear layers.

        raw [n, conv_dim] enters the convolution, gates [n, 2, v_heads] are g and beta in float32.
        """
        ...

    def finish(self) -> None:
        """All layers have run: states that they wrote are what the next forward reads."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a batch that stand together and reach earlier tokens in one way: blocks, or prompt chunks."""

    rows: Rows
    attend: AttendRows
    recur: RecurRows | None = None
    """Of a hybrid target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetMemory:
    """What forwards read and write. Graphs hold these tensors, so they stay where they are."""

    pool: KvPool
    """Target KV."""
    page_table: torch.Tensor
    """int32 [num_slots + 1, max_pages]"""
    slots: SlotState
    """In the exchange, shared with the draft."""
    features: torch.Tensor | None
    """[rows, taps * hidden], in the exchange; None without taps."""
    tap_layers: tuple[int, ...]
    """Layers whose outputs are the features, in the draft's order."""
    states: DeviceStates | None = None
    """Of a hybrid target."""


class TargetNetwork:
    """The layers of a decoder on kernels; what reaches earlier tokens is passed in."""

    def __init__(self, model: Decoder, memory: TargetMemory) -> None:
        self.model = model
        self._memory = memory
        self._heads = [_heads_of(layer, model) for layer in model.layers if isinstance(layer, DecoderLayer)]

    def hidden(
        self,
        x: torch.Tensor,
        segments: Sequence[Segment],
        first_row: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Final-normed rows [n, hidden] of embedded rows x [n, hidden], which is overwritten.

        segments: of all rows, in order. K and V of every row go to its place in the pages. Features of row r go to
        exchange row first_row + r; first_row: int32 or int64 [1] on the device. wanted: int64, the rows to return;
        None is all. After what it writes the last layer computes only these, unless it is tapped.
        """
        layers, model = self.model.layers, self.model
        last = len(layers) - 1
        u = norm_for(_mixing(layers[0]), x, layers[0].input_norm)
        num_full = num_linear = 0
        for i, layer in enumerate(layers):
            norm, tap = model.norm if i == last else layers[i + 1].input_norm, self._tap(i, first_row)
            following = model.head if i == last else _mixing(layers[i + 1])
            if isinstance(layer, DeltaLayer):
                out = _recur(num_linear, layer, u, segments)
                num_linear += 1
            else:
                out = self._attend(num_full, layer, u, segments)
                num_full += 1
            if wanted is not None and i == last and tap is None:
                out, x, wanted = out.index_select(0, wanted), x.index_select(0, wanted), None
            mlp = layer.mlp
            u, x = linear_for(mlp.gate_up, out, layer.o, AddNorm(residual=x, norm=layer.post_norm))
            gated = linear_for(mlp.down, u, mlp.gate_up, Gated(act=model.shape.hidden_act))
            u, x = linear_for(following, gated, mlp.down, AddNorm(residual=x, norm=norm, tap=tap))
        assert isinstance(u, torch.Tensor), "the head takes rows in the model's dtype"
        for segment in segments:
            if segment.recur is not None:
                segment.recur.finish()
        return u if wanted is None else u.index_select(0, wanted)

    def _attend(self, index: int, layer: DecoderLayer, u: LayerRows, segments: Sequence[Segment]) -> LayerRows:
        """What the layer's output projection multiplies."""
        pages, shape = (self._memory.pool.k(index), self._memory.pool.v(index)), self.model.shape
        qkv = linear(u, layer.qkv)
        found, start = [], 0
        for segment in segments:
            end = start + segment.rows.num_rows
            q, k, v = rotate_heads_into_pages(qkv[start:end], segment.rows, self._heads[index], pages)
            found.append(segment.attend(index, q, k, v).reshape(end - start, -1))
            start = end
        out = found[0] if len(found) == 1 else torch.cat(found)
        if layer.is_gated:
            first = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
            out = gate_for(layer.o, qkv[:, first:], out, "sigmoid")
        return out

    def _tap(self, layer: int, first_row: torch.Tensor) -> Tap | None:
        memory = self._memory
        if memory.features is None or layer not in memory.tap_layers:
            return None
        width = self.model.shape.hidden_size
        place = memory.tap_layers.index(layer) * width
        return Tap(features=memory.features[:, place : place + width], first_row=first_row)


class BlockAttend:
    """Attention of verify blocks over the pages, for all layers of one bucket."""

    def __init__(self, pool: KvPool, context: Context, block_size: int, scratch: AttentionScratch) -> None:
        self._pool = pool
        self._context = context
        self._block_size = block_size
        self._scratch = scratch

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See AttendRows."""
        q, k, v = (part.view(-1, self._block_size, *part.shape[1:]) for part in (q, k, v))
        return block_attention(
            q, k, v, self._pool.k(layer), self._pool.v(layer), self._context,
            causal=True, window=0, scratch=self._scratch,
        )  # fmt: skip


def _mixing(layer: DecoderLayer | DeltaLayer) -> Linear:
    """What multiplies the layer's normed rows first."""
    return layer.proj if isinstance(layer, DeltaLayer) else layer.qkv


def _recur(index: int, layer: DeltaLayer, u: LayerRows, segments: Sequence[Segment]) -> torch.Tensor:
    """What the layer's output projection multiplies."""
    spec, heads = layer.spec, layer.spec.num_v_heads
    sizes = [spec.conv_dim, spec.value_size, spec.gate_width, spec.gate_width]
    raw, z, b, a = linear(u, layer.proj).split(sizes, dim=-1)
    gates = delta_gates(b[:, :heads], a[:, :heads], layer.rate, layer.dt_bias)
    found, start = [], 0
    for segment in segments:
        assert segment.recur is not None, f"linear layer {index} without states"
        end = start + segment.rows.num_rows
        found.append(segment.recur(index, raw[start:end], gates[start:end]))
        start = end
    out = found[0] if len(found) == 1 else torch.cat([part.float() for part in found])
    return gated_norm(out, z.unflatten(1, (heads, spec.v_dim)), layer.norm)


def _heads_of(layer: DecoderLayer, model: Decoder) -> HeadSpec:
    shape = model.shape
    return HeadSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rotary=model.rotary,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
    )
