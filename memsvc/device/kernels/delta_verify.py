"""The gated delta net over verify blocks, one layer a launch: rows are replayed from the ring, then come the block's.

A program has a part of the columns of one head's state in registers, reads it once, and takes row after row: it
convolves and norms the row's inputs itself and works with what the row does to its columns. The state is written
where a page edge was passed, and the block's rows go into the ring: of what heads and parts share, each element is
written by one of them, and read by none in the same launch.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from memsvc.device.kernels import ahead as fetching
from memsvc.device.kernels import launch as launching
from memsvc.device.kernels.ahead import fetch_ahead
from memsvc.device.kernels.delta_memory import DeltaMemory, find_ring_row, find_states
from memsvc.device.kernels.heads import store_part
from memsvc.device.kernels.launch import cut, padded, wait_for_inputs
from memsvc.device.kernels.places import BlockRows

EPS = tl.constexpr(1e-6)
"""Under the root of the length of q and of k."""
LITTLE = tl.constexpr(2.0**-24)
"""When so little is left of a state, its numbers are brought to their own size again, long before they end."""
NOTHING = tl.constexpr(2.0**-60)
"""What a row leaves of a state at least: far below the last place of what comes after."""


class DeltaTile(NamedTuple):
    """How a head is shared out. With one warp nothing waits for other warps, row by row."""

    columns: int
    """Of the state of a head, v_dim of them, that a program has."""
    num_warps: int


TILE = DeltaTile(32, 1)


class _Part(NamedTuple):
    """What a program has of a row and of a state: channels and places."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    seen_k: tl.tensor
    """Of q and of k: those that exist."""
    seen_v: tl.tensor
    head: tl.tensor
    out: tl.tensor
    """Where v lies in a row of outputs."""
    state: tl.tensor
    seen: tl.tensor
    is_first: tl.tensor
    """Of the head's programs."""
    is_first_of_key: tl.tensor
    """Of all programs that read q and k."""


class _Rows(NamedTuple):
    """Where the rows of a slot are: addresses, and strides between rows or pages."""

    pages: tl.tensor
    """Of the ring."""
    ring_raw: tl.tensor
    ring_gates: tl.tensor
    raw: tl.tensor
    """Of the block, which begins at position `length`."""
    gates: tl.tensor
    ring_stride: tl.tensor
    ring_gates_stride: tl.tensor
    raw_stride: tl.tensor
    gates_stride: tl.tensor
    beta_stride: tl.tensor
    length: tl.tensor


@triton.jit
def _in_ring(position, rows, CONV: tl.constexpr, HEADS: tl.constexpr, PAGE_ROWS: tl.constexpr,
             RING_PAGES: tl.constexpr):  # fmt: skip
    """Addresses of a row's raw inputs and of its gates in the ring."""
    page, row = find_ring_row(position, rows.pages, PAGE_ROWS, RING_PAGES)
    gates = rows.ring_gates + page * rows.ring_gates_stride + row * (2 * HEADS)
    return rows.ring_raw + page * rows.ring_stride + row * CONV, gates


@triton.jit
def _load_inputs(raw, part, needs_q):
    """q, k, v as they enter the convolution, float32."""
    q = tl.load(raw + part.q, mask=part.seen_k & needs_q, other=0.0).to(tl.float32)
    k = tl.load(raw + part.k, mask=part.seen_k, other=0.0).to(tl.float32)
    return q, k, tl.load(raw + part.v, mask=part.seen_v, other=0.0).to(tl.float32)


@triton.jit
def _load_row(position, rows, part, CONV: tl.constexpr, KERNEL: tl.constexpr, HEADS: tl.constexpr,
              PAGE_ROWS: tl.constexpr, RING_PAGES: tl.constexpr):  # fmt: skip
    """(q, k, v, g, beta) of a row, from the ring or from the block. Of replayed rows q matters to the block's only."""
    step = position - rows.length
    if step < 0:
        raw, gates = _in_ring(position, rows, CONV, HEADS, PAGE_ROWS, RING_PAGES)
        q, k, v = _load_inputs(raw, part, step > -KERNEL)
        g, beta = tl.load(gates + part.head), tl.load(gates + HEADS + part.head)
    else:
        q, k, v = _load_inputs(rows.raw + step * rows.raw_stride, part, True)
        gates = rows.gates + step * rows.gates_stride + part.head
        g, beta = tl.load(gates), tl.load(gates + rows.beta_stride)
    return q, k, v, g, beta


@triton.jit
def _part_of(program, HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr,
             V_DIM: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    head, dims = program // PARTS, tl.arange(0, K_PAD)
    cols = program % PARTS * COLS + tl.arange(0, COLS)
    KEYS: tl.constexpr = HEADS // GROUP * K_DIM
    key, value = head // GROUP * K_DIM + dims, head * V_DIM + cols
    in_state, seen = (head * K_DIM + dims)[:, None] * V_DIM + cols[None, :], (dims < K_DIM)[:, None] & (cols < V_DIM)
    return _Part(key, KEYS + key, 2 * KEYS + value, dims < K_DIM, cols < V_DIM, head, value, in_state, seen,
                 program % PARTS == 0, program % (PARTS * GROUP) == 0)  # fmt: skip


@triton.jit
def _load_before(conv_rows, part, is_there, CONV: tl.constexpr, KERNEL: tl.constexpr, AGE: tl.constexpr):
    """The row AGE rows before the first one, from the state's page; zeros if the convolution doesn't reach it."""
    row, seen_k, seen_v = conv_rows, part.seen_k & is_there, part.seen_v & is_there
    if AGE < KERNEL:
        row += (KERNEL - 1 - AGE) * CONV
    else:
        seen_k, seen_v = seen_k & False, seen_v & False
    q = tl.load(row + part.q, mask=seen_k, other=0.0).to(tl.float32)
    k = tl.load(row + part.k, mask=seen_k, other=0.0).to(tl.float32)
    return q, k, tl.load(row + part.v, mask=seen_v, other=0.0).to(tl.float32)


@triton.jit
def _convolve(x, x1, x2, x3, conv, channels, seen, CONV: tl.constexpr, KERNEL: tl.constexpr):
    """silu of the convolution: x is the row itself, x1 the one before it."""
    total = x * tl.load(conv + (KERNEL - 1) * CONV + channels, mask=seen, other=0.0)
    total += x1 * tl.load(conv + (KERNEL - 2) * CONV + channels, mask=seen, other=0.0)
    if KERNEL > 2:
        total += x2 * tl.load(conv + (KERNEL - 3) * CONV + channels, mask=seen, other=0.0)
    if KERNEL > 3:
        total += x3 * tl.load(conv + (KERNEL - 4) * CONV + channels, mask=seen, other=0.0)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _at_unit_length(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


@triton.jit
def _take_in(state, held, k, v, g, beta):
    """(state, held) after a row. The state is their product: so forgetting costs one product, not one an element."""
    held *= tl.maximum(tl.exp(g), NOTHING)
    d = beta * (v - held * tl.sum(state * k[:, None], 0))
    # A loop, since of a branch the products would be issued in every row.
    while held < LITTLE:
        state *= LITTLE
        held /= LITTLE
    return state + k[:, None] * (d / held)[None, :], held


@triton.jit
def _keep_row(position, rows, part, q, k, v, g, beta, CONV: tl.constexpr, HEADS: tl.constexpr,
              PAGE_ROWS: tl.constexpr, RING_PAGES: tl.constexpr):  # fmt: skip
    """Store a row in the ring, each element by one of the programs that have it."""
    raw, gates = _in_ring(position, rows, CONV, HEADS, PAGE_ROWS, RING_PAGES)
    store_part(raw, part.q, q, part.seen_k & part.is_first_of_key)
    store_part(raw, part.k, k, part.seen_k & part.is_first_of_key)
    store_part(raw, part.v, v, part.seen_v)
    tl.store(gates + part.head, g, mask=part.is_first)
    tl.store(gates + HEADS + part.head, beta, mask=part.is_first)


@triton.jit
def _run_rows(state, before, is_there, rows, part, conv, out, written, first, edge, scale, B: tl.constexpr,
              CONV: tl.constexpr, KERNEL: tl.constexpr, PAGE_ROWS: tl.constexpr, RING_PAGES: tl.constexpr,
              HEADS: tl.constexpr, V_DIM: tl.constexpr):  # fmt: skip
    """All rows of a slot. The state at `edge` goes to `written`, outputs of the block to `out`."""
    q1, k1, v1 = _load_before(before, part, is_there, CONV, KERNEL, 1)
    q2, k2, v2 = _load_before(before, part, is_there, CONV, KERNEL, 2)
    q3, k3, v3 = _load_before(before, part, is_there, CONV, KERNEL, 3)
    q, k, v, g, beta = _load_row(first, rows, part, CONV, KERNEL, HEADS, PAGE_ROWS, RING_PAGES)
    held = 1.0
    for position in range(first, rows.length + B):
        # Asked for a row ahead.
        following = tl.minimum(position + 1, rows.length + B - 1)
        q0, k0, v0, g0, beta0 = _load_row(following, rows, part, CONV, KERNEL, HEADS, PAGE_ROWS, RING_PAGES)
        unit = _at_unit_length(_convolve(k, k1, k2, k3, conv, part.k, part.seen_k, CONV, KERNEL))
        value = _convolve(v, v1, v2, v3, conv, part.v, part.seen_v, CONV, KERNEL)
        state, held = _take_in(state, held, unit, value, g, beta)
        if position + 1 == edge:
            tl.store(written + part.state, state * held, mask=part.seen)
        if position >= rows.length:
            unit = _at_unit_length(_convolve(q, q1, q2, q3, conv, part.q, part.seen_k, CONV, KERNEL))
            found = tl.sum(state * unit[:, None], 0) * (held * scale)
            tl.store(out + (position - rows.length) * (HEADS * V_DIM) + part.out, found, mask=part.seen_v)
            _keep_row(position, rows, part, q, k, v, g, beta, CONV, HEADS, PAGE_ROWS, RING_PAGES)
        q1, q2, q3, k1, k2, k3, v1, v2, v3 = q, q1, q2, k, k1, k2, v, v1, v2
        q, k, v, g, beta = q0, k0, v0, g0, beta0


@triton.jit(do_not_specialize=["layer"])
def _verify(raw, gates, conv, out, recurrent, conv_rows, ring_raw, ring_gates, members, lengths, done, state_len,
            state_in, state_out, ring, layer, raw_stride, gates_stride, beta_stride, recurrent_stride, conv_stride,
            ring_stride, ring_gates_stride, scale, ahead, ahead_bytes, LAYERS: tl.constexpr, PAGE: tl.constexpr,
            B: tl.constexpr, CONV: tl.constexpr, KERNEL: tl.constexpr, PAGE_ROWS: tl.constexpr,
            RING_PAGES: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr,
            K_PAD: tl.constexpr, V_DIM: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
            OVERLAP: tl.constexpr):  # fmt: skip
    fetch_ahead(ahead, ahead_bytes)
    part = _part_of(tl.program_id(0), HEADS, GROUP, K_DIM, K_PAD, V_DIM, COLS, PARTS)
    wait_for_inputs(OVERLAP)
    place = tl.program_id(1).to(tl.int64)
    member = tl.load(members + place).to(tl.int64)
    live, first, length, edge = find_states(member, lengths, state_len, done, PAGE)
    out += place * (B * HEADS * V_DIM)
    if live:
        at = member * LAYERS + layer
        page, written = tl.load(state_in + at).to(tl.int64), tl.load(state_out + at).to(tl.int64)
        is_there = (page != 0) & (first > 0)
        state = tl.load(recurrent + page * recurrent_stride + part.state, mask=part.seen & is_there, other=0.0)
        rows = _Rows(ring + at * RING_PAGES, ring_raw, ring_gates, raw + place * B * raw_stride,
                     gates + place * B * gates_stride, ring_stride, ring_gates_stride, raw_stride, gates_stride,
                     beta_stride, length)  # fmt: skip
        _run_rows(state, conv_rows + page * conv_stride, is_there, rows, part, conv, out,
                  recurrent + written * recurrent_stride, first, edge, scale, B, CONV, KERNEL, PAGE_ROWS, RING_PAGES,
                  HEADS, V_DIM)  # fmt: skip
    else:
        for step in range(B):
            tl.store(out + step * (HEADS * V_DIM) + part.out, tl.zeros([COLS], tl.float32), mask=part.seen_v)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSite:
    """One linear layer, as its launches need it."""

    memory: DeltaMemory
    layer: int
    """Its number among the linear layers."""
    conv: torch.Tensor
    """[kernel, conv_dim] float32, the row itself last."""
    tile: DeltaTile = TILE


def delta_verify(
    raw: torch.Tensor, gates: torch.Tensor, rows: BlockRows, site: DeltaSite, ahead: torch.Tensor | None = None
) -> torch.Tensor:
    """Outputs [N * B, v_heads, v_dim] float32 of the blocks' rows; zeros for slots that are done.

    raw [N * B, conv_dim] of the model's dtype and gates [N * B, 2, v_heads] float32 may be strided. Tables stay as
    they are: see move_states. ahead: the weight that is multiplied next (kernels.ahead).
    """
    memory, conv, tile, size = site.memory, site.conv, site.tile, rows.block_size
    form, heads, channels = memory.state, memory.state.num_heads, memory.state.conv_dim
    expected = (rows.num_rows, channels), (rows.num_rows, 2, heads), (form.conv_rows + 1, channels)
    if (raw.shape, gates.shape, conv.shape) != expected or raw.dtype != form.dtype:
        raise ValueError(
            f"raw {list(raw.shape)} {raw.dtype}, gates {list(gates.shape)} and conv {list(conv.shape)} do not go with "
            f"{rows.num_rows} rows and {form}"
        )
    assert raw.stride(1) == gates.stride(2) == 1, f"strides {raw.stride()} of raw, {gates.stride()} of gates"
    assert conv.is_contiguous(), f"strides {conv.stride()} of conv"
    out = torch.empty((rows.num_rows, heads, form.v_dim), dtype=torch.float32, device=raw.device)
    columns = min(tile.columns, padded(form.v_dim))
    parts = cut(form.v_dim, columns)
    # Products are fused with sums here: half of all instructions, and no other code rounds as this does.
    _verify[heads * parts, len(rows.members)](
        raw, gates, conv, out, memory.recurrent, memory.conv, ring_gates=memory.ring_gates, layer=site.layer,
        raw_stride=raw.stride(0), gates_stride=gates.stride(0), beta_stride=gates.stride(1),
        recurrent_stride=memory.recurrent.stride(0), ring_gates_stride=memory.ring_gates.stride(0),
        scale=form.k_dim**-0.5, B=size, HEADS=heads, GROUP=heads // memory.num_k_heads,
        K_DIM=form.k_dim, K_PAD=padded(form.k_dim), V_DIM=form.v_dim, COLS=columns, PARTS=parts,
        **dict(zip(("ahead", "ahead_bytes"), fetching.operands(ahead), strict=True)), **memory.arguments(rows),
        OVERLAP=launching.OVERLAP, num_warps=tile.num_warps, launch_pdl=launching.OVERLAP,
    )  # fmt: skip
    return out
