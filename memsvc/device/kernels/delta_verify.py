"""The gated delta net over verify blocks, two launches a layer: rows are replayed from the ring, then come the block's.

The first brings all rows together (delta_rows). A program of the second has a part of the columns of one head's state,
and takes all rows at once, on the tensor cores (delta_chunk). Where a page edge was passed, it writes the state at that
edge first, which is what the rows after it then find.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.delta_chunk import forgotten, lengths_of, products, solve, weighted
from memsvc.device.kernels.delta_memory import DeltaMemory, find_states
from memsvc.device.kernels.delta_rows import bring_rows
from memsvc.device.kernels.delta_site import DeltaSite, DeltaTile
from memsvc.device.kernels.launch import cut, padded
from memsvc.device.kernels.places import BlockRows

LEAST = 16
"""Of rows and of columns: what tl.dot takes."""
FEW, MANY = DeltaTile(64, 4), DeltaTile(128, 4, registers=168)
FEW_HEADS = 96
"""FEW up to so many heads of all places together. All that a column has in common with its head is made once a part:
more parts are done sooner, fewer cost less; with fewer registers three programs are at work at a time instead of two."""


def choose_tile(num_heads: int) -> DeltaTile:
    """For heads of all places together."""
    return FEW if num_heads <= FEW_HEADS else MANY


class _Part(NamedTuple):
    """What a program has of a row and of a state. Tuples are pieces of k_dim."""

    q: tuple
    """Columns of a row of q,"""
    k: tuple
    """of k and v together: those of k,"""
    v: tl.tensor
    """and those of v."""
    seen_k: tuple
    """Of q and of k: those that exist."""
    seen_v: tl.tensor
    out: tl.tensor
    """Where v lies in a row of outputs."""
    state: tuple


class _Rows(NamedTuple):
    """RowsAtHand of a place, its gates of one head: addresses of the row at s, and of the block's first q."""

    q: tl.tensor
    kv: tl.tensor
    decay: tl.tensor
    beta: tl.tensor
    first: tl.tensor
    """s"""
    length: tl.tensor
    """L"""


@triton.jit
def _part_of(head, part, HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr,
             V_DIM: tl.constexpr, COLS: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    cols, k, seen, state = part * COLS + tl.arange(0, COLS), (), (), ()
    for begin in tl.static_range(0, K_PAD, PIECE):
        dims = begin + tl.arange(0, PIECE)
        k += (head // GROUP * K_DIM + dims,)
        seen += (dims < K_DIM,)
        state += ((head * K_DIM + dims)[:, None] * V_DIM + cols[None, :],)
    values = head * V_DIM + cols
    return _Part(k, k, HEADS // GROUP * K_DIM + values, seen, cols < V_DIM, values, state)


@triton.jit
def _load_rows(source, at, seen_rows, columns, seen, STRIDE: tl.constexpr):
    """Some columns of rows, zeros where either is not seen."""
    mask = seen_rows[:, None] & seen[None, :]
    return tl.load(source + at[:, None] * STRIDE + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _load_keys(source, at, seen_rows, columns, seen, STRIDE: tl.constexpr):
    """(pieces of rows of q or of k, what brings them to unit length)."""
    pieces = ()
    for i in tl.static_range(len(columns)):
        pieces += (_load_rows(source, at, seen_rows, columns[i], seen[i], STRIDE),)
    return pieces, lengths_of(pieces)


@triton.jit
def _load_state(source, has_state, part, i: tl.constexpr):
    """A piece of it."""
    mask = (part.seen_k[i] & has_state)[:, None] & part.seen_v[None, :]
    return tl.load(source + part.state[i], mask=mask, other=0.0)


@triton.jit
def _load_decay(rows, at, begin, end):
    """Sums of g of rows from `begin` on, up to and with each row, behind the last one as at it.

    float32 if the model has half as many bits.
    """
    before = tl.load(rows.decay + (begin - 1 - rows.first), mask=begin > rows.first, other=0.0)
    decay = tl.load(rows.decay + (tl.minimum(at, end - 1) - rows.first)) - before
    return decay if rows.kv.dtype.element_ty.primitive_bitwidth == 32 else decay.to(tl.float32)


@triton.jit
def _load_chunk(rows, begin, end, part, WIDTH: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """(positions, k, what brings k to unit length, v, sums of g, and what rows add to the state by what they ask for).

    Of rows [begin, end). Those behind them have beta = 0: they do nothing.
    """
    at = begin + tl.arange(0, ROWS)
    seen = at < end
    k, unit = _load_keys(rows.kv, at - rows.first, seen, part.k, part.seen_k, WIDTH)
    v = _load_rows(rows.kv, at - rows.first, seen, part.v, part.seen_v, WIDTH)
    decay = _load_decay(rows, at, begin, end)
    beta = tl.load(rows.beta + (at - rows.first), mask=seen, other=0.0)
    solved = solve(products(k, k, PRECISION) * (unit[:, None] * unit[None, :]), decay, beta, at, PRECISION)
    return at, k, unit, v, decay, solved


@triton.jit
def _write_state(source, has_state, written, begin, edge, rows, part, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """The state after rows [begin, edge). It is read twice, since few steps do so."""
    at, k, unit, v, decay, solved = _load_chunk(rows, begin, edge, part, WIDTH, ROWS, PRECISION)
    last = tl.sum(tl.where(at == edge - 1, decay, 0.0), 0)
    since = tl.exp(decay.to(tl.float32)) * unit
    left = tl.exp(tl.where(at < edge, (last - decay).to(tl.float32), float("-inf"))) * unit
    held = tl.zeros(v.shape, tl.float32)
    for i in tl.static_range(len(k)):
        held = tl.dot(k[i].to(tl.float32), _load_state(source, has_state, part, i), held, input_precision=PRECISION)
    u = tl.dot(solved, v.to(tl.float32) - since[:, None] * held, input_precision=PRECISION)
    for i in tl.static_range(len(k)):
        state = _load_state(source, has_state, part, i) * tl.exp(last.to(tl.float32))
        faded = k[i].to(tl.float32) * left[:, None]
        state = tl.dot(tl.trans(faded), u, state, input_precision=PRECISION)
        # Where they are read is where they are written, but not by the same threads.
        tl.debug_barrier()
        tl.store(written + part.state[i], state, mask=part.seen_k[i][:, None] & part.seen_v[None, :])


@triton.jit
def _read_state(source, has_state, begin, rows, part, out, scale, B: tl.constexpr, KEYS: tl.constexpr,
                HEADS: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr, NEW: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """Outputs of the block's rows, of a state that stands at `begin`.

    Of the state a row reads what its q holds, less what k of the rows before it have overwritten of that.
    """
    WIDTH: tl.constexpr = KEYS + HEADS * V_DIM
    at, k, unit, v, decay, solved = _load_chunk(rows, begin, rows.length + B, part, WIDTH, ROWS, PRECISION)
    number = tl.arange(0, NEW)
    new, is_new = rows.length + number, number < B
    q, unit_q = _load_keys(rows.q, number, is_new, part.q, part.seen_k, KEYS)
    decay_new = _load_decay(rows, new, begin, rows.length + B)
    seen = products(q, k, PRECISION) * (unit_q[:, None] * unit[None, :] * scale)
    seen *= forgotten(decay_new, decay, at[None, :] <= new[:, None])
    taken = tl.dot(seen, solved, input_precision=PRECISION)
    found = weighted(taken, v, tl.zeros([NEW, v.shape[1]], tl.float32), PRECISION)
    taken *= (tl.exp(decay.to(tl.float32)) * unit)[None, :]
    held = (tl.exp(decay_new.to(tl.float32)) * unit_q * scale)[:, None]
    for i in tl.static_range(len(k)):
        x = weighted(-taken, k[i], q[i].to(tl.float32) * held, PRECISION)
        found = tl.dot(x, _load_state(source, has_state, part, i), found, input_precision=PRECISION)
    to = out + number[:, None] * (HEADS * V_DIM) + part.out[None, :]
    tl.store(to, found, mask=is_new[:, None] & part.seen_v[None, :])


@triton.jit(do_not_specialize=["layer"])
def _verify(q, kv, decay, beta, out, recurrent, members, lengths, done, state_len, state_in, state_out, layer,
            recurrent_stride, scale, LAYERS: tl.constexpr, PAGE: tl.constexpr, B: tl.constexpr, HEADS: tl.constexpr,
            GROUP: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr, V_DIM: tl.constexpr, MOST: tl.constexpr,
            COLS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, WRITTEN: tl.constexpr, NEW: tl.constexpr,
            PIECE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    program, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    KEYS: tl.constexpr = HEADS // GROUP * K_DIM
    WIDTH: tl.constexpr = KEYS + HEADS * V_DIM
    head = program // PARTS
    part = _part_of(head, program % PARTS, HEADS, GROUP, K_DIM, K_PAD, V_DIM, COLS, PIECE)
    # Whatever says where things are: after the member all at once, then the things themselves all at once.
    member = tl.load(members + place).to(tl.int64)
    at = member * LAYERS + layer
    live, first, length, edge = find_states(member, lengths, state_len, done, PAGE)
    page, written = tl.load(state_in + at).to(tl.int64), tl.load(state_out + at).to(tl.int64)
    out += place * (B * HEADS * V_DIM)
    if live:
        source, has_state, begin = recurrent + page * recurrent_stride, (page != 0) & (first > 0), first
        sums = (place * HEADS + head) * MOST
        rows = _Rows(q + place * (B * KEYS), kv + place * (MOST * WIDTH), decay + sums, beta + sums, first, length)
        if edge > first:
            to = recurrent + written * recurrent_stride
            _write_state(source, has_state, to, first, edge, rows, part, WIDTH, WRITTEN, PRECISION)
            tl.debug_barrier()
            source, has_state, begin = to, has_state | True, edge
        _read_state(source, has_state, begin, rows, part, out, scale, B, KEYS, HEADS, V_DIM, ROWS, NEW, PRECISION)
    else:
        for step in range(B):
            tl.store(out + step * (HEADS * V_DIM) + part.out, tl.zeros([COLS], tl.float32), mask=part.seen_v)


def chunk_sizes(memory: DeltaMemory, block_size: int) -> dict[str, int]:
    """Rows of chunks, as powers of two: ROWS behind the last page edge, WRITTEN up to it, and NEW ones of a block."""
    page = memory.page_size
    passed = (memory.ring.num_rows - block_size) // page * page
    return {"ROWS": _rows(page - 1 + block_size), "WRITTEN": _rows(passed), "NEW": _rows(block_size)}


def _rows(num: int) -> int:
    return max(LEAST, padded(num))


def delta_verify(raw: torch.Tensor, gates: torch.Tensor, rows: BlockRows, site: DeltaSite) -> torch.Tensor:
    """Outputs [N * B, v_heads, v_dim] float32 of the blocks' rows; zeros for slots that are done.

    raw [N * B, conv_dim] of the model's dtype and gates [N * B, 2, v_heads] float32 may be strided. Tables stay as
    they are: see move_states.
    """
    memory, conv, size = site.memory, site.conv, rows.block_size
    form, heads, channels, tables = memory.state, memory.state.num_heads, memory.state.conv_dim, memory.tables
    expected = (rows.num_rows, channels), (rows.num_rows, 2, heads), (form.conv_rows + 1, channels)
    if (raw.shape, gates.shape, conv.shape) != expected or raw.dtype != form.dtype:
        raise ValueError(
            f"raw {list(raw.shape)} {raw.dtype}, gates {list(gates.shape)} and conv {list(conv.shape)} do not go with "
            f"{rows.num_rows} rows and {form}"
        )
    assert raw.stride(1) == gates.stride(2) == 1, f"strides {raw.stride()} of raw, {gates.stride()} of gates"
    assert conv.is_contiguous(), f"strides {conv.stride()} of conv"
    at_hand = bring_rows(raw, gates, rows, site)
    out = torch.empty((rows.num_rows, heads, form.v_dim), dtype=torch.float32, device=raw.device)
    tile = site.tile or choose_tile(heads * len(rows.members))
    columns, k_pad = max(LEAST, min(tile.columns, padded(form.v_dim))), max(LEAST, padded(form.k_dim))
    parts = cut(form.v_dim, columns)
    # Products are fused with sums here: half of all instructions, and no other code rounds as this does.
    _verify[heads * parts, len(rows.members)](
        at_hand.q, at_hand.kv, at_hand.decay, at_hand.beta, out, memory.recurrent, rows.members, rows.lengths, rows.done,
        tables.state_len, tables.state_in, tables.state_out, site.layer, memory.recurrent.stride(0),
        scale=form.k_dim**-0.5, LAYERS=tables.state_in.shape[1], PAGE=memory.page_size, B=size, HEADS=heads,
        GROUP=heads // memory.num_k_heads, K_DIM=form.k_dim, K_PAD=k_pad, V_DIM=form.v_dim, MOST=at_hand.most, COLS=columns,
        PARTS=parts, PIECE=min(tile.piece, k_pad),
        PRECISION=tile.precision or ("tf32" if raw.dtype.itemsize < 4 else "tf32x3"), **chunk_sizes(memory, size),
        num_warps=tile.num_warps, num_stages=1, maxnreg=tile.registers,
    )  # fmt: skip
    return out
