"""The second launch of the gated delta net over verify blocks: a program takes all rows to columns of one head's state.

It takes them at once, on the tensor cores (delta_chunk). Where a page edge was passed, it writes the state at that edge
first, which is what the rows after it then find.

What limits it is shared memory: the small matrices of rows, and the state, on their way to the tensor cores. So keys and
states are read in loops that copy them there a round ahead, without passing through registers, and chunks of few rows
have smaller matrices.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from typing import NamedTuple

import triton
import triton.language as tl

from memsvc.device.kernels.delta_chunk import forgotten, one_over_lengths, products, solve, taken_in, times, weighted
from memsvc.device.kernels.delta_rows import COMPILED, NOTED

LEAST = tl.constexpr(16)
"""Of rows and of columns: what tl.dot takes."""
_STAGES = tl.constexpr(2)
"""Pieces of keys and states that are on their way, or being worked on, at a time."""


class _Part(NamedTuple):
    """What a program has of a row and of a state."""

    head: tl.tensor
    k: tl.tensor
    """First column of k in a row of k and v together, and of q in one of q."""
    v: tl.tensor
    """Columns of v there."""
    columns: tl.tensor
    """Columns of the head's state, and of its outputs."""
    seen: tl.tensor
    """Those that exist."""


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


class _State(NamedTuple):
    """Where a state is read."""

    at: tl.tensor
    """Address of the page."""
    is_there: tl.tensor
    """Else it is zeros."""


@triton.jit
def _arrive(x):
    """x of a load, not to be waited for before this.

    A load that goes straight to shared memory is waited for where it stands, whatever loads come behind it.
    """
    if not COMPILED:
        return x
    elif x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@triton.jit
def _load_keys(source, at, is_row, part, piece, STRIDE: tl.constexpr, K_DIM: tl.constexpr, PIECE: tl.constexpr):
    """A piece of rows of q or of k."""
    dims = piece * PIECE + tl.arange(0, PIECE)
    mask = is_row[:, None]
    if K_DIM % PIECE:
        mask = mask & (dims < K_DIM)[None, :]
    return tl.load(source + at[:, None] * STRIDE + (part.k + dims)[None, :], mask=mask, other=0.0)


@triton.jit
def _find_piece(part, piece, K_DIM: tl.constexpr, V_DIM: tl.constexpr, PIECE: tl.constexpr):
    """(where a piece of a head's state lies in a page, what of it exists)."""
    dims = piece * PIECE + tl.arange(0, PIECE)
    seen = part.seen[None, :]
    if K_DIM % PIECE:
        seen = seen & (dims < K_DIM)[:, None]
    return (part.head * K_DIM + dims)[:, None] * V_DIM + part.columns[None, :], seen


@triton.jit
def _load_state(state, part, piece, K_DIM: tl.constexpr, V_DIM: tl.constexpr, PIECE: tl.constexpr):
    at, seen = _find_piece(part, piece, K_DIM, V_DIM, PIECE)
    return tl.load(state.at + at, mask=seen & state.is_there, other=0.0).to(tl.float32)


@triton.jit
def _load_values(rows, at, is_row, part, STRIDE: tl.constexpr):
    mask = is_row[:, None] & part.seen[None, :]
    return tl.load(rows.kv + at[:, None] * STRIDE + part.v[None, :], mask=mask, other=0.0)


@triton.jit
def _load_decay(rows, at, begin, end):
    """Sums of g of rows from `begin` on, up to and with each row, behind the last one as at it.

    float32 if the model has half as many bits.
    """
    before = tl.load(rows.decay + (begin - 1 - rows.first), mask=begin > rows.first, other=0.0)
    decay = tl.load(rows.decay + (tl.minimum(at, end - 1) - rows.first)) - before
    return decay if rows.kv.dtype.element_ty.primitive_bitwidth == 32 else decay.to(tl.float32)


@triton.jit
def _write_state(state, written, begin, edge, rows, part, WIDTH: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr,
                 V_DIM: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The state after rows [begin, edge). It is read twice, since few steps do so."""
    at = begin + tl.arange(0, ROWS)
    row, is_row = at - rows.first, at < edge
    v = _load_values(rows, row, is_row, part, WIDTH)
    decay = _load_decay(rows, at, begin, edge)
    beta = tl.load(rows.beta + row, mask=is_row, other=0.0)
    kk, held = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros(v.shape, tl.float32)
    for piece in tl.range(0, K_PAD // PIECE, num_stages=_STAGES):
        k = _load_keys(rows.kv, row, is_row, part, piece, WIDTH, K_DIM, PIECE)
        kk = products(k, k, kk, PRECISION)
        found = _load_state(state, part, piece, K_DIM, V_DIM, PIECE)
        held = tl.dot(k.to(tl.float32), found, held, input_precision=PRECISION)
    # Behind the last row beta is 0: what stands there does nothing.
    unit, solved = one_over_lengths(kk, 1), solve(kk, decay, beta, at, PRECISION)
    last = tl.sum(tl.where(at == edge - 1, decay, 0.0), 0)
    since = tl.exp(decay.to(tl.float32)) * unit
    left = tl.exp(tl.where(is_row, (last - decay).to(tl.float32), float("-inf"))) * unit
    u = tl.dot(solved, _arrive(v).to(tl.float32) - since[:, None] * held, input_precision=PRECISION) * left[:, None]
    for piece in tl.range(0, K_PAD // PIECE, num_stages=_STAGES):
        k = _load_keys(rows.kv, row, is_row, part, piece, WIDTH, K_DIM, PIECE)
        found = _load_state(state, part, piece, K_DIM, V_DIM, PIECE)
        found = taken_in(k, u, found * tl.exp(last.to(tl.float32)), PRECISION)
        to, seen = _find_piece(part, piece, K_DIM, V_DIM, PIECE)
        # Where they are read is where they are written, but not by the same threads.
        tl.debug_barrier()
        tl.store(written + to, found.to(written.dtype.element_ty), mask=seen)


@triton.jit
def _read_state(state, begin, rows, part, out, scale, B: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
                K_DIM: tl.constexpr, K_PAD: tl.constexpr, V_DIM: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr,
                NEW: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Outputs of the block's rows, of a state that stands at `begin`.

    Of the state a row reads what its q holds, less what k of the rows before it have overwritten of that.
    """
    WIDTH: tl.constexpr = KEYS + HEADS * V_DIM
    at, number = begin + tl.arange(0, ROWS), tl.arange(0, NEW)
    row, is_row, is_new = at - rows.first, at < rows.length + B, number < B
    v = _load_values(rows, row, is_row, part, WIDTH)
    decay = _load_decay(rows, at, begin, rows.length + B)
    decay_new = _load_decay(rows, rows.length + number, begin, rows.length + B)
    beta = tl.load(rows.beta + row, mask=is_row, other=0.0)
    kk, qq = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([NEW, NEW], tl.float32)
    seen = tl.zeros([NEW, ROWS], tl.float32)
    for piece in tl.range(0, K_PAD // PIECE, num_stages=_STAGES):
        k = _load_keys(rows.kv, row, is_row, part, piece, WIDTH, K_DIM, PIECE)
        q = _load_keys(rows.q, number, is_new, part, piece, KEYS, K_DIM, PIECE)
        kk, qq, seen = products(k, k, kk, PRECISION), products(q, q, qq, PRECISION), products(q, k, seen, PRECISION)
    unit, unit_q = one_over_lengths(kk, 0), one_over_lengths(qq, 1) * scale
    seen *= unit_q[:, None] * unit[None, :]
    seen *= forgotten(decay_new, decay, at[None, :] <= (rows.length + number)[:, None])
    taken = times(seen, solve(kk, decay, beta, at, PRECISION), PRECISION)
    found = weighted(taken, _arrive(v), tl.zeros([NEW, v.shape[1]], tl.float32), PRECISION)
    taken *= (tl.exp(decay.to(tl.float32)) * unit)[None, :]
    held = (tl.exp(decay_new.to(tl.float32)) * unit_q)[:, None]
    for piece in tl.range(0, K_PAD // PIECE, num_stages=_STAGES):
        k = _load_keys(rows.kv, row, is_row, part, piece, WIDTH, K_DIM, PIECE)
        q = _load_keys(rows.q, number, is_new, part, piece, KEYS, K_DIM, PIECE)
        x = weighted(-taken, k, q.to(tl.float32) * held, PRECISION)
        kept = _load_state(state, part, piece, K_DIM, V_DIM, PIECE)
        found = tl.dot(x, kept, found, input_precision=PRECISION)
    to = out + number[:, None] * (HEADS * V_DIM) + (part.head * V_DIM + part.columns)[None, :]
    tl.store(to, found, mask=is_new[:, None] & part.seen[None, :])


@triton.jit
def verify_states(q, kv, decay, beta, noted, out, recurrent, recurrent_stride, scale, B: tl.constexpr,
                  HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr,
                  V_DIM: tl.constexpr, MOST: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
                  WRITTEN: tl.constexpr, NEW: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """For PARTS programs a head, and a place: see delta_verify."""
    program, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    KEYS: tl.constexpr = HEADS // GROUP * K_DIM
    WIDTH: tl.constexpr = KEYS + HEADS * V_DIM
    head, values = program // PARTS, program % PARTS * COLS + tl.arange(0, COLS)
    part = _Part(head, head // GROUP * K_DIM, KEYS + head * V_DIM + values, values, values < V_DIM)
    noted += place * NOTED
    first, length, edge = tl.load(noted), tl.load(noted + 1), tl.load(noted + 2)
    page, written = tl.load(noted + 3).to(tl.int64), tl.load(noted + 4).to(tl.int64)
    out += place * (B * HEADS * V_DIM)
    if first >= 0:
        state, begin = _State(recurrent + page * recurrent_stride, (page != 0) & (first > 0)), first
        sums = (place * HEADS + head) * MOST
        rows = _Rows(q + place * (B * KEYS), kv + place * (MOST * WIDTH), decay + sums, beta + sums, first, length)
        if edge > first:
            to = recurrent + written * recurrent_stride
            _write_state(state, to, first, edge, rows, part, WIDTH, K_DIM, K_PAD, V_DIM, PIECE, WRITTEN, PRECISION)
            tl.debug_barrier()
            state, begin = _State(to, state.is_there | True), edge
        if (ROWS > LEAST) & (length + B - begin <= LEAST):
            _read_state(state, begin, rows, part, out, scale, B, KEYS, HEADS, K_DIM, K_PAD, V_DIM, PIECE, LEAST, NEW,
                        PRECISION)  # fmt: skip
        else:
            _read_state(state, begin, rows, part, out, scale, B, KEYS, HEADS, K_DIM, K_PAD, V_DIM, PIECE, ROWS, NEW,
                        PRECISION)  # fmt: skip
    else:
        for step in range(B):
            to = out + step * (HEADS * V_DIM) + head * V_DIM + values
            tl.store(to, tl.zeros([COLS], tl.float32), mask=part.seen)
