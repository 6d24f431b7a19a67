"""Rows of verify blocks as the gated delta net takes them: all that are replayed and the block's, convolved, at hand.

Rows [s, L) of a slot lie in the ring, [L, L + B) in the block; the convolution reaches a few rows further back, which
lie with the state that stands at s. A layer's first launch brings them together, rounded to the model's dtype as those
of prompts are (sums are fused here, so a row may differ from a prompt's in its last bit), and puts the block's into the ring: of what heads share nothing is then done by each of them.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.delta_memory import find_states, load_ring
from memsvc.device.kernels.delta_site import DeltaSite
from memsvc.device.kernels.launch import cut, padded
from memsvc.device.kernels.places import BlockRows

CHANNELS, WARPS = 512, 4
"""Of a program, and its warps."""
GATE_HEADS = 16
"""Of a program that sums up gates."""
NOTED = tl.constexpr(8)
"""Numbers a place of RowsAtHand.noted, of which five are set."""

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_GROUP = tl.constexpr(8)
"""Rows of a program: as many loads are on their way at the same time, and a few more."""
_ALL = tl.constexpr(-128.0)
"""A gate of which e^g is 0 in float32."""
_SILU = tl.constexpr("""{
    .reg .f32 y;
    mul.ftz.f32 y, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 y, y;
    add.ftz.f32 y, y, 0f3F800000;
    rcp.approx.ftz.f32 y, y;
    mul.ftz.f32 $0, $1, y;
}""")
"""x / (1 + e^-x); the first number is -log2(e)."""


class _Slot(NamedTuple):
    """Where the rows of a slot are: addresses, and strides between rows."""

    ring_raw: tuple
    """For each page of the ring: where row 0 would be if all pages were behind each other and this one in its place."""
    ring_gates: tuple
    turn: tl.tensor
    """The position at which the ring began anew, at or before s."""
    raw: tl.tensor
    """Of the block."""
    gates: tl.tensor
    conv_rows: tl.tensor
    """Of the page of the state."""
    has_state: tl.tensor
    """Else zeros are before the first row."""
    raw_stride: tl.tensor
    gates_stride: tl.tensor
    beta_stride: tl.tensor
    first: tl.tensor
    """s"""
    length: tl.tensor
    """L"""
    end: tl.tensor
    """L + B"""


@triton.jit
def _ring_pages(ring, ids, stride, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Addresses of a ring's pages, as _Slot has them; ids as load_ring has them, rows of WIDTH numbers."""
    pages = ()
    for i in tl.static_range(len(ids)):
        pages += (ring + (ids[i] * stride - i * PAGE_ROWS * WIDTH),)
    return pages


@triton.jit
def _ring_address(position, pages, turn, WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """Addresses of rows from s on."""
    row = position - turn
    row = tl.where(row >= PAGE_ROWS * len(pages), row - PAGE_ROWS * len(pages), row)
    page = pages[0]
    for i in tl.static_range(1, len(pages)):
        page = tl.where(row >= i * PAGE_ROWS, pages[i], page)
    return page + row * WIDTH


@triton.jit
def _find_raw(position, slot, CONV: tl.constexpr, KERNEL: tl.constexpr, PAGE_ROWS: tl.constexpr):
    """(address of the raw inputs of a row, whether they are more than zeros)."""
    at = _ring_address(position, slot.ring_raw, slot.turn, CONV, PAGE_ROWS)
    at = tl.where(position < slot.length, at, slot.raw + (position - slot.length) * slot.raw_stride)
    before = position - slot.first
    at = tl.where(before < 0, slot.conv_rows + (before + KERNEL - 1) * CONV, at)
    return at, (slot.has_state | (before >= 0)) & (position < slot.end)


@triton.jit
def _silu(x):
    if COMPILED:
        # Triton's exponential and division provide for numbers near 0, with 14 instructions instead of 5.
        return tl.inline_asm_elementwise(_SILU, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def _convolve(begin, group, out, out_stride, channels, seen, slot, conv, CONV: tl.constexpr, KERNEL: tl.constexpr,
              PAGE_ROWS: tl.constexpr):  # fmt: skip
    """Some channels of a group of rows [begin, L + B), the first to out; what is raw of the block goes into the ring."""
    start = begin + group * _GROUP
    weights, rows = (), ()
    for i in tl.static_range(KERNEL):
        weights += (tl.load(conv + i * CONV + channels, mask=seen, other=0.0),)
    for i in tl.static_range(_GROUP + KERNEL - 1):
        source, there = _find_raw(start + i - (KERNEL - 1), slot, CONV, KERNEL, PAGE_ROWS)
        rows += (tl.load(source + channels, mask=seen & there, other=0.0),)
    for i in tl.static_range(_GROUP):
        position = start + i
        total = tl.zeros([channels.shape[0]], tl.float32)
        for tap in tl.static_range(KERNEL):
            total += rows[i + tap].to(tl.float32) * weights[tap]
        is_row = position < slot.end
        to = _ring_address(position, slot.ring_raw, slot.turn, CONV, PAGE_ROWS)
        tl.store(to + channels, rows[i + KERNEL - 1], mask=seen & is_row & (position >= slot.length))
        to = out + (position - begin) * out_stride
        tl.store(to + channels, _silu(total).to(out.dtype.element_ty), mask=seen & is_row)


@triton.jit
def _sum_gates(heads, slot, decay, beta, HEADS: tl.constexpr, PAGE_ROWS: tl.constexpr, MOST: tl.constexpr,
               PAD: tl.constexpr):  # fmt: skip
    """Gates of rows [s, L + B) of some heads: sums of g up to each row, and beta. The block's go into the ring."""
    at = slot.first + tl.arange(0, PAD)
    seen, is_new = (at < slot.end)[None, :] & (heads < HEADS)[:, None], (at >= slot.length)[None, :]
    ring = _ring_address(at, slot.ring_gates, slot.turn, 2 * HEADS, PAGE_ROWS)[None, :] + heads[:, None]
    block = (slot.gates + (at - slot.length) * slot.gates_stride)[None, :] + heads[:, None]
    g = tl.load(tl.where(is_new, block, ring), mask=seen, other=0.0)
    takes = tl.load(tl.where(is_new, block + slot.beta_stride, ring + HEADS), mask=seen, other=0.0)
    tl.store(ring, g, mask=seen & is_new)
    tl.store(ring + HEADS, takes, mask=seen & is_new)
    row = heads[:, None] * MOST + tl.arange(0, PAD)[None, :]
    # Of large sums differences are taken, which are near 0 between rows that forget little. What is past float32 forgets
    # all, and is no larger than that makes it: else float32, which models of 16 bits take differences in, were too coarse.
    tl.store(decay + row, tl.cumsum(tl.maximum(g, _ALL).to(tl.float64), 1), mask=seen)
    tl.store(beta + row, takes, mask=seen)


@triton.jit
def _note(to, live, first, length, edge, page, written):
    """For the second launch, in one place: see RowsAtHand.noted."""
    tl.store(to, tl.where(live, first, -1))
    tl.store(to + 1, length)
    tl.store(to + 2, edge)
    tl.store(to + 3, page.to(tl.int32))
    tl.store(to + 4, written)


@triton.jit(do_not_specialize=["layer"])
def _bring(raw, gates, conv, q, kv, decay, beta, noted, conv_rows, ring_raw, ring_gates, members, lengths, done, state_len,
           state_in, state_out, ring, layer, raw_stride, gates_stride, beta_stride, conv_stride, ring_stride, ring_gates_stride,
           LAYERS: tl.constexpr, PAGE: tl.constexpr, B: tl.constexpr, CONV: tl.constexpr, KEYS: tl.constexpr,
           KERNEL: tl.constexpr, PAGE_ROWS: tl.constexpr, RING_PAGES: tl.constexpr, HEADS: tl.constexpr, MOST: tl.constexpr,
           PAD: tl.constexpr, CHANNELS: tl.constexpr, GATE_HEADS: tl.constexpr):  # fmt: skip
    """A program has some channels of a group of a place's rows: of q, which new rows alone have, or of k and v.

    The last ones have gates, of all rows.
    """
    part, place, group = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    Q_PARTS: tl.constexpr = (KEYS + CHANNELS - 1) // CHANNELS
    PARTS: tl.constexpr = Q_PARTS + (CONV - KEYS + CHANNELS - 1) // CHANNELS
    # Whatever says where things are: after the member all at once, then the things themselves all at once.
    member = tl.load(members + place).to(tl.int64)
    at = member * LAYERS + layer
    live, first, length, edge = find_states(member, lengths, state_len, done, PAGE)
    page, ids = tl.load(state_in + at).to(tl.int64), load_ring(ring + at * RING_PAGES, RING_PAGES)
    if (part == 0) & (group == 0):
        _note(noted + place * NOTED, live, first, length, edge, page, tl.load(state_out + at))
    if live:
        slot = _Slot(
            _ring_pages(ring_raw, ids, ring_stride, CONV, PAGE_ROWS),
            _ring_pages(ring_gates, ids, ring_gates_stride, 2 * HEADS, PAGE_ROWS),
            first - first % (PAGE_ROWS * RING_PAGES), raw + place * B * raw_stride, gates + place * B * gates_stride,
            conv_rows + page * conv_stride, (page != 0) & (first > 0), raw_stride, gates_stride, beta_stride, first,
            length, length + B)  # fmt: skip
        if part < Q_PARTS:
            if length + group * _GROUP < slot.end:
                channels = part * CHANNELS + tl.arange(0, CHANNELS)
                _convolve(length, group, q + place * B * KEYS, KEYS, channels, channels < KEYS, slot, conv, CONV, KERNEL,
                          PAGE_ROWS)  # fmt: skip
        elif part < PARTS:
            if first + group * _GROUP < slot.end:
                channels = KEYS + (part - Q_PARTS) * CHANNELS + tl.arange(0, CHANNELS)
                _convolve(first, group, kv + place * MOST * (CONV - KEYS) - KEYS, CONV - KEYS, channels, channels < CONV,
                          slot, conv, CONV, KERNEL, PAGE_ROWS)  # fmt: skip
        elif group == 0:
            sums, heads = place * HEADS * MOST, (part - PARTS) * GATE_HEADS + tl.arange(0, GATE_HEADS)
            _sum_gates(heads, slot, decay + sums, beta + sums, HEADS, PAGE_ROWS, MOST, PAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsAtHand:
    """Rows of each place of a batch from s on, L - s + B of them; what lies behind them is anything."""

    q: torch.Tensor
    """[N, B, keys] of the model's dtype: of the block's rows."""
    kv: torch.Tensor
    """[N, most, keys + values]"""
    decay: torch.Tensor
    """[N, heads, most] float64: sum of g up to and with a row."""
    beta: torch.Tensor
    """[N, heads, most] float32"""
    noted: torch.Tensor
    """[N, NOTED] int32: s (-1 where nothing may be read or written), L, w, and the pages of the states of the layer that
    are read and written."""

    @property
    def most(self) -> int:
        """Rows a place, at most."""
        return self.kv.shape[1]


def bring_rows(raw: torch.Tensor, gates: torch.Tensor, rows: BlockRows, site: DeltaSite) -> RowsAtHand:
    """For delta_verify, which says what the operands are. The block's rows are in the ring afterwards."""
    memory, size, num = site.memory, rows.block_size, len(rows.members)
    form, heads, most = memory.state, memory.state.num_heads, memory.ring.num_rows
    keys, device = memory.num_k_heads * form.k_dim, raw.device
    others = form.conv_dim - keys
    at_hand = RowsAtHand(
        q=torch.empty((num, size, keys), dtype=raw.dtype, device=device),
        kv=torch.empty((num, most, others), dtype=raw.dtype, device=device),
        decay=torch.empty((num, heads, most), dtype=torch.float64, device=device),
        beta=torch.empty((num, heads, most), dtype=torch.float32, device=device),
        noted=torch.empty((num, NOTED.value), dtype=torch.int32, device=device),
    )  # fmt: skip
    channels = min(CHANNELS, padded(others))
    programs = cut(keys, channels) + cut(others, channels) + cut(heads, GATE_HEADS)
    _bring[programs, num, cut(most, _GROUP.value)](
        raw, gates, site.conv, at_hand.q, at_hand.kv, at_hand.decay, at_hand.beta, at_hand.noted, memory.conv,
        state_out=memory.tables.state_out, ring_gates=memory.ring_gates, layer=site.layer, raw_stride=raw.stride(0), gates_stride=gates.stride(0),
        beta_stride=gates.stride(1), ring_gates_stride=memory.ring_gates.stride(0), B=size, KEYS=keys, HEADS=heads,
        MOST=most, PAD=padded(most), CHANNELS=channels, GATE_HEADS=GATE_HEADS, **memory.arguments(rows), num_warps=WARPS,
    )  # fmt: skip
    return at_hand
