"""Rows of sequences as a gated delta net's rule takes them: convolved, wherever the rows before them lie.

A sequence goes on from a state that stands at s. Its rows [s, start) lie in the ring, those from `start` on in the
batch; of the rows before s the state's page keeps as many as the convolution reaches.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportCallIssue=false

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from memsvc.device.gated_delta import DeltaRows
from memsvc.device.kernels.delta_memory import DeltaMemory
from memsvc.device.kernels.launch import cut, launch, padded

BLOCK, WARPS = 1024, 4
"""Channels of a program at most, and its warps."""
TILE_ROWS, TILE_BLOCK = 8, 256
"""Of a program that convolves several rows of a sequence: each weight is read once for all of them, and each row too."""
TILED_ROWS = 64
"""Of a sequence, on average, from which on most tiles are of rows that lie together in the batch. Others are done row
by row, which takes as long as so many programs one after another."""


class _Sources(NamedTuple):
    """Where the rows of a sequence lie: addresses, strides and positions."""

    raw: tl.tensor
    ring_raw: tl.tensor
    conv_rows: tl.tensor
    """Of the state's page."""
    pages: tl.tensor
    """Ids of the ring's pages."""
    raw_stride: tl.tensor
    ring_stride: tl.tensor
    state_len: tl.tensor
    start: tl.tensor
    first: tl.tensor
    """Row of the batch at `start`."""


@triton.jit
def _in_ring(position, pages, PAGE_ROWS: tl.constexpr, RING_PAGES: tl.constexpr):
    """(page id int64, row of the page) of a position in the ring."""
    row = position % (PAGE_ROWS * RING_PAGES)
    return tl.load(pages + row // PAGE_ROWS).to(tl.int64), row % PAGE_ROWS


@triton.jit
def _sources(raw, ring_raw, conv_rows, sequences, state_in, ring, sequence, layer, raw_stride, ring_stride,
             conv_stride, num_sequences, LAYERS: tl.constexpr, RING_PAGES: tl.constexpr):  # fmt: skip
    slot, state_len = tl.load(sequences + sequence), tl.load(sequences + num_sequences + sequence)
    sequences += 2 * num_sequences
    start, first = tl.load(sequences + sequence), tl.load(sequences + num_sequences + sequence)
    at = slot * LAYERS + layer
    page = tl.load(state_in + at).to(tl.int64)
    return _Sources(raw, ring_raw, conv_rows + page * conv_stride, ring + at * RING_PAGES, raw_stride, ring_stride,
                    state_len, start, first)  # fmt: skip


@triton.jit
def _load_raw(position, channels, seen, rows, CONV: tl.constexpr, KERNEL: tl.constexpr, PAGE_ROWS: tl.constexpr,
              RING_PAGES: tl.constexpr):  # fmt: skip
    """What enters the convolution at a position, float32; zeros before the first token."""
    if position >= rows.start:
        x = tl.load(rows.raw + (rows.first + position - rows.start) * rows.raw_stride + channels, mask=seen, other=0.0)
    elif position >= rows.state_len:
        page, row = _in_ring(position, rows.pages, PAGE_ROWS, RING_PAGES)
        x = tl.load(rows.ring_raw + page * rows.ring_stride + row * CONV + channels, mask=seen, other=0.0)
    else:
        row = KERNEL - 1 + position - rows.state_len
        x = tl.load(rows.conv_rows + row * CONV + channels, mask=seen & (rows.state_len > 0), other=0.0)
    return x.to(tl.float32)


@triton.jit
def _store_gates(gates, ring_gates, g, beta, row, position, rows, gates_stride, beta_stride, ring_gates_stride,
                 HEADS: tl.constexpr, PAD: tl.constexpr, PAGE_ROWS: tl.constexpr,
                 RING_PAGES: tl.constexpr):  # fmt: skip
    heads = tl.arange(0, PAD)
    seen = heads < HEADS
    if position >= rows.start:
        at = gates + (rows.first + position - rows.start) * gates_stride + heads
        forgets, takes = tl.load(at, mask=seen), tl.load(at + beta_stride, mask=seen)
    else:
        page, place = _in_ring(position, rows.pages, PAGE_ROWS, RING_PAGES)
        at = ring_gates + page * ring_gates_stride + place * (2 * HEADS) + heads
        forgets, takes = tl.load(at, mask=seen), tl.load(at + HEADS, mask=seen)
    tl.store(g + row * HEADS + heads, forgets, mask=seen)
    tl.store(beta + row * HEADS + heads, takes, mask=seen)


@triton.jit
def _part_of(block, CONV: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """(0, 1 or 2: of q, k or v; columns there; channels; which of them there are) of a block of channels."""
    KEY_BLOCKS: tl.constexpr = (KEYS + BLOCK - 1) // BLOCK
    part = tl.minimum(block // KEY_BLOCKS, 2)
    cols = (block - part * KEY_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    return part, cols, part * KEYS + cols, cols < tl.where(part < 2, KEYS, CONV - 2 * KEYS)


@triton.jit
def _store_part(q, k, v, total, part, places, cols, seen, CONV: tl.constexpr, KEYS: tl.constexpr):
    """total through silu. places: rows, in total's form."""
    total = (total / (1.0 + tl.exp(-total))).to(q.dtype.element_ty)
    if part == 0:
        tl.store(q + places * KEYS + cols, total, mask=seen)
    elif part == 1:
        tl.store(k + places * KEYS + cols, total, mask=seen)
    else:
        tl.store(v + places * (CONV - 2 * KEYS) + cols, total, mask=seen)


@triton.jit
def _convolve_row(row, position, rows, block, conv, gates, ring_gates, q, k, v, g, beta, gates_stride, beta_stride,
                  ring_gates_stride, CONV: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, PAD: tl.constexpr,
                  KERNEL: tl.constexpr, PAGE_ROWS: tl.constexpr, RING_PAGES: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    part, cols, channels, seen = _part_of(block, CONV, KEYS, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(KERNEL):
        x = _load_raw(position - (KERNEL - 1 - tap), channels, seen, rows, CONV, KERNEL, PAGE_ROWS, RING_PAGES)
        total += x * tl.load(conv + tap * CONV + channels, mask=seen, other=0.0)
    _store_part(q, k, v, total, part, row, cols, seen, CONV, KEYS)
    if block == 0:
        _store_gates(gates, ring_gates, g, beta, row, position, rows, gates_stride, beta_stride, ring_gates_stride,
                     HEADS, PAD, PAGE_ROWS, RING_PAGES)  # fmt: skip


@triton.jit
def _convolve_tile(row, position, rows, block, conv, gates, q, k, v, g, beta, gates_stride, beta_stride,
                   ROWS: tl.constexpr, CONV: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, PAD: tl.constexpr,
                   KERNEL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """ROWS rows from `row` at `position` on, which lie in the batch as all do that they reach."""
    part, cols, channels, seen = _part_of(block, CONV, KEYS, BLOCK)
    steps, first = tl.arange(0, ROWS)[:, None], rows.first + position - rows.start
    cols, channels, seen = cols[None, :], channels[None, :], seen[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tap in tl.static_range(KERNEL):
        at = rows.raw + (first + steps - (KERNEL - 1 - tap)) * rows.raw_stride + channels
        x = tl.load(at, mask=seen, other=0.0).to(tl.float32)
        total += x * tl.load(conv + tap * CONV + channels, mask=seen, other=0.0)
    _store_part(q, k, v, total, part, row + steps, cols, seen, CONV, KEYS)
    if block == 0:
        heads = tl.arange(0, PAD)[None, :]
        there = heads < HEADS
        source, to = gates + (first + steps) * gates_stride + heads, (row + steps) * HEADS + heads
        tl.store(g + to, tl.load(source, mask=there), mask=there)
        tl.store(beta + to, tl.load(source + beta_stride, mask=there), mask=there)


@triton.jit(
    do_not_specialize=["layer", "first_row", "num_rows", "num_sequences"],
    do_not_specialize_on_alignment=["owners", "positions", "sequences"],
)
def _convolve(raw, gates, conv, ring_raw, ring_gates, conv_rows, owners, positions, sequences, state_in, ring, q, k, v,
              g, beta, layer, first_row, num_rows, raw_stride, gates_stride, beta_stride, ring_stride, ring_gates_stride,
              conv_stride, num_sequences, LAYERS: tl.constexpr, CONV: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
              PAD: tl.constexpr, KERNEL: tl.constexpr, PAGE_ROWS: tl.constexpr, RING_PAGES: tl.constexpr,
              ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1)
    owners, positions = owners + first_row + row, positions + first_row + row
    owner, position = tl.load(owners), tl.load(positions)
    rows = _sources(raw, ring_raw, conv_rows, sequences, state_in, ring, owner, layer, raw_stride, ring_stride,
                    conv_stride, num_sequences, LAYERS, RING_PAGES)  # fmt: skip
    if ROWS == 1:
        _convolve_row(row, position, rows, block, conv, gates, ring_gates, q, k, v, g, beta, gates_stride, beta_stride,
                      ring_gates_stride, CONV, KEYS, HEADS, PAD, KERNEL, PAGE_ROWS, RING_PAGES, BLOCK)  # fmt: skip
    else:
        steps = tl.arange(0, ROWS)
        there = row + steps < num_rows
        ours = tl.load(owners + steps, mask=there, other=-1) == owner
        ours &= tl.load(positions + steps, mask=there, other=-1) == position + steps
        if (tl.sum(ours.to(tl.int32), 0) == ROWS) & (position - (KERNEL - 1) >= rows.start):
            _convolve_tile(row, position, rows, block, conv, gates, q, k, v, g, beta, gates_stride, beta_stride, ROWS,
                           CONV, KEYS, HEADS, PAD, KERNEL, BLOCK)  # fmt: skip
        else:
            for step in range(tl.minimum(num_rows - row, ROWS).to(tl.int32)):
                its = _sources(raw, ring_raw, conv_rows, sequences, state_in, ring, tl.load(owners + step), layer,
                               raw_stride, ring_stride, conv_stride, num_sequences, LAYERS, RING_PAGES)  # fmt: skip
                _convolve_row(row + step, tl.load(positions + step), its, block, conv, gates, ring_gates, q, k, v, g,
                              beta, gates_stride, beta_stride, ring_gates_stride, CONV, KEYS, HEADS, PAD, KERNEL,
                              PAGE_ROWS, RING_PAGES, BLOCK)  # fmt: skip


@triton.jit(
    do_not_specialize=["layer", "num_sequences"],
    do_not_specialize_on_alignment=["owners", "positions", "sequences"],
)
def _gather(raw, ring_raw, conv_rows, owners, positions, sequences, state_in, ring, out, layer, raw_stride, ring_stride,
            conv_stride, num_sequences, LAYERS: tl.constexpr, CONV: tl.constexpr, KERNEL: tl.constexpr, PAGE_ROWS: tl.constexpr,
            RING_PAGES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows = _sources(raw, ring_raw, conv_rows, sequences, state_in, ring, tl.load(owners + row), layer, raw_stride,
                    ring_stride, conv_stride, num_sequences, LAYERS, RING_PAGES)  # fmt: skip
    x = _load_raw(tl.load(positions + row), channels, channels < CONV, rows, CONV, KERNEL, PAGE_ROWS, RING_PAGES)
    tl.store(out + row * CONV + channels, x.to(out.dtype.element_ty), mask=channels < CONV)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Sequences of a batch, and some rows of them in any order. All int64, contiguous, on the device."""

    facts: torch.Tensor
    """[4, n]: slot, s, start, and the row of the batch at start."""
    owners: torch.Tensor
    """[m]: sequence of each row,"""
    positions: torch.Tensor
    """[m]: and its position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceInputs:
    """What the rows of a batch bring to one linear layer."""

    memory: DeltaMemory
    layer: int
    """Its number among the linear layers."""
    conv: torch.Tensor
    """[kernel, conv_dim] float32, the row itself last."""
    raw: torch.Tensor
    """[rows, conv_dim] of the model's dtype"""
    gates: torch.Tensor
    """[rows, 2, v_heads] float32"""

    def convolved(self, sequences: Sequences, rows: slice, dtype: torch.dtype) -> DeltaRows:
        """Some of the rows of `sequences` in one sequence of a batch of 1; q, k and v of dtype."""
        memory, (first, end) = self.memory, (rows.start, rows.stop)
        form, num, device = memory.state, end - first, self.raw.device
        keys, values = memory.num_k_heads * form.k_dim, form.num_heads * form.v_dim
        q, k = (torch.empty((1, num, memory.num_k_heads, form.k_dim), dtype=dtype, device=device) for _ in range(2))
        v = torch.empty((1, num, form.num_heads, form.v_dim), dtype=dtype, device=device)
        g, beta = (torch.empty((1, num, form.num_heads), dtype=torch.float32, device=device) for _ in range(2))
        is_tiled = num >= TILED_ROWS * sequences.facts.shape[1]
        tile, most = (TILE_ROWS, TILE_BLOCK) if is_tiled else (1, BLOCK)
        block = min(most, padded(max(keys, values)))
        launch(
            _convolve, (cut(num, tile), 2 * cut(keys, block) + cut(values, block)), WARPS, self.raw, self.gates,
            self.conv, ring_gates=memory.ring_gates, q=q, k=k, v=v, g=g, beta=beta, first_row=first, num_rows=num,
            gates_stride=self.gates.stride(0), beta_stride=self.gates.stride(1),
            ring_gates_stride=memory.ring_gates.stride(0), KEYS=keys, HEADS=form.num_heads,
            PAD=padded(form.num_heads), ROWS=tile, BLOCK=block, **self._places(sequences),
        )  # fmt: skip
        return DeltaRows(q, k, v, g, beta)

    def gathered(self, sequences: Sequences) -> torch.Tensor:
        """Raw inputs of the rows of `sequences`, [m, conv_dim]."""
        num, width = len(sequences.owners), self.memory.state.conv_dim
        out = torch.empty((num, width), dtype=self.raw.dtype, device=self.raw.device)
        block = min(BLOCK, padded(width))
        launch(_gather, (num, cut(width, block)), WARPS, self.raw, out=out, BLOCK=block, **self._places(sequences))
        return out

    def _places(self, sequences: Sequences) -> dict[str, object]:
        memory, ring = self.memory, self.memory.ring
        assert self.raw.stride(1) == 1, f"strides {self.raw.stride()} of raw"
        assert self.conv.is_contiguous(), f"strides {self.conv.stride()} of conv"
        assert sequences.facts.is_contiguous(), f"strides {sequences.facts.stride()} of facts"
        return {
            "ring_raw": memory.ring_raw, "conv_rows": memory.conv, "owners": sequences.owners,
            "positions": sequences.positions, "sequences": sequences.facts, "state_in": memory.tables.state_in,
            "ring": memory.tables.ring, "layer": self.layer, "raw_stride": self.raw.stride(0),
            "ring_stride": memory.ring_raw.stride(0), "conv_stride": memory.conv.stride(0),
            "num_sequences": sequences.facts.shape[1], "LAYERS": memory.tables.state_in.shape[1], "CONV": ring.conv_dim,
            "KERNEL": memory.state.conv_rows + 1, "PAGE_ROWS": ring.page_rows, "RING_PAGES": ring.num_pages,
        }  # fmt: skip
