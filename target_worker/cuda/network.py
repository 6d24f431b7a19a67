"""The target's forward over static tensors: blocks to verify inside a graph, prompt chunks outside.

The same arithmetic as target_worker.model.decoder, rounded where it rounds, with one kernel for whatever lies between
two GEMMs. Of a block nothing is read on the host, lengths and tokens neither.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from memsvc.device.kernels.attention_tiles import AttentionScratch
from memsvc.device.kernels.block_attention import Context, block_attention
from memsvc.device.kernels.heads import HeadSpec, rotate_heads_into_pages
from memsvc.device.kernels.mlp import gate_mul
from memsvc.device.kernels.norm import Tap, rms_norm
from memsvc.device.kernels.places import Rows
from memsvc.device.kv_pool import KvPool
from memsvc.device.linear import AddNorm, Gated, linear
from memsvc.device.slots import SlotState
from target_worker.model.decoder import Decoder, DecoderLayer

AttendRows = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q [n, heads, d], k [n, kv_heads, d], v) -> [n, heads, d]. k and v are in the pages already."""


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


class TargetNetwork:
    """The layers of a dense decoder on kernels; attention over earlier tokens is passed in."""

    def __init__(self, model: Decoder, memory: TargetMemory) -> None:
        """Raises ValueError if the target has layers that are computed on the CPU only."""
        if model.delta_layers:
            raise ValueError(f"{model.shape.architecture} has gated delta net layers, which run on the CPU only")
        self.model = model
        self._memory = memory
        self._layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
        self._heads = [_heads_of(layer, model) for layer in self._layers]

    def hidden(self, x: torch.Tensor, rows: Rows, attend: AttendRows, first_row: torch.Tensor) -> torch.Tensor:
        """Final-normed rows [n, hidden] of embedded rows x [n, hidden], which is overwritten.

        K and V of every row go to its place in the pages. Features of row r go to exchange row first_row + r;
        first_row: int32 [1] on the device.
        """
        layers, model = self._layers, self.model
        u = rms_norm(x, layers[0].input_norm, ahead=layers[0].qkv.weight)
        for i, layer in enumerate(layers):
            mlp = layer.mlp
            is_last = i + 1 == len(layers)
            norm, following = (model.norm, model.head) if is_last else (layers[i + 1].input_norm, layers[i + 1].qkv)
            out = self._mix(i, layer, u, rows, attend)
            u, x = linear(out, layer.o, AddNorm(residual=x, norm=layer.post_norm, ahead=mlp.gate_up.weight))
            gated = linear(u, mlp.gate_up, Gated(act=model.shape.hidden_act, ahead=mlp.down.weight))
            tap = self._tap(i, first_row)
            u, x = linear(gated, mlp.down, AddNorm(residual=x, norm=norm, tap=tap, ahead=following.weight))
        return u

    def _mix(self, index: int, layer: DecoderLayer, u: torch.Tensor, rows: Rows, attend: AttendRows) -> torch.Tensor:
        """What the layer's output projection multiplies."""
        pool, shape = self._memory.pool, self.model.shape
        qkv = linear(u, layer.qkv)
        q, k, v = rotate_heads_into_pages(
            qkv, rows, self._heads[index], (pool.k(index), pool.v(index)), ahead=layer.o.weight
        )
        out = attend(index, q, k, v).reshape(len(u), -1)
        if layer.is_gated:
            first = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
            out = gate_mul(qkv[:, first:], out, "sigmoid")
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

    def __init__(self, memory: TargetMemory, members: torch.Tensor, block_size: int, scratch: AttentionScratch) -> None:
        slots = memory.slots
        self._pool = memory.pool
        self._block_size = block_size
        self._scratch = scratch
        self._context = Context(memory.page_table, members, torch.zeros_like(slots.length), slots.length)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See AttendRows."""
        q, k, v = (part.view(-1, self._block_size, *part.shape[1:]) for part in (q, k, v))
        return block_attention(
            q, k, v, self._pool.k(layer), self._pool.v(layer), self._context,
            causal=True, window=0, scratch=self._scratch,
        )  # fmt: skip


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
