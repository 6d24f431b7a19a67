"""The gated delta net over verify blocks, one layer a launch: rows are replayed from the ring, then come the block's.

A program has a part of the columns of one head's state, reads it once, and takes all rows at once, in chunks on the
tensor cores (delta_chunk): nearly always one chunk holds them. It convolves and norms their inputs itself. The state
is written where a page edge was passed, and the block's rows go into the ring: of what heads and parts share, each
element is written by one of them, and read by none in the same launch.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.delta_chunk import at_unit_length, forgotten, products, solve
from memsvc.device.kernels.delta_memory import DeltaMemory, find_states, load_ring
from memsvc.device.kernels.delta_rows import SlotRows, convolve, keep_gates, keep_raw, load_gates, load_raw, ring_pages
from memsvc.device.kernels.launch import cut, padded
from memsvc.device.kernels.places import BlockRows

LEAST = 16
"""Of rows and of columns: what tl.dot takes."""


class DeltaTile(NamedTuple):
    """How a head is shared out."""

    columns: int
    """Of the state of a head, v_dim of them, that a program has: a power of two, at least LEAST."""
    num_warps: int
    piece: int = 64
    """Of k_dim: what the tensor cores get at a time."""
    registers: int | None = None
    """Of a thread, at most; else as many as suit one program by itself."""
    precision: str | None = None
    """Of products on the tensor cores; else by the model's dtype."""


FEW, MANY = DeltaTile(64, 8, registers=128), DeltaTile(128, 4)
FEW_HEADS = 96
"""FEW up to so many heads of all places together. All that a column has in common with its head is made once a part:
more parts and warps are done sooner, fewer cost less."""


def choose_tile(num_heads: int) -> DeltaTile:
    """For heads of all places together."""
    return FEW if num_heads <= FEW_HEADS else MANY


class _Part(NamedTuple):
    """What a program has of a row and of a state. Tuples are pieces of k_dim."""

    q: tuple
    """Channels of q,"""
    k: tuple
    """and of k."""
    kv: tuple
    """of k and, last, of v."""
    seen_k: tuple
    """Of q and of k: those that exist."""
    seen_kv: tuple
    seen_v: tl.tensor
    head: tl.tensor
    out: tl.tensor
    """Where v lies in a row of outputs."""
    state: tuple
    is_first: tl.tensor
    """Of the head's programs."""
    is_first_of_key: tl.tensor
    """Of all programs that read q and k."""


@triton.jit
def _part_of(head, part, HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr,
             V_DIM: tl.constexpr, COLS: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    KEYS: tl.constexpr = HEADS // GROUP * K_DIM
    cols, q, k, seen, state = part * COLS + tl.arange(0, COLS), (), (), (), ()
    for begin in tl.static_range(0, K_PAD, PIECE):
        dims = begin + tl.arange(0, PIECE)
        q += (head // GROUP * K_DIM + dims,)
        k += (KEYS + head // GROUP * K_DIM + dims,)
        seen += (dims < K_DIM,)
        state += ((head * K_DIM + dims)[:, None] * V_DIM + cols[None, :],)
    kv, seen_kv = k, seen
    kv += (2 * KEYS + head * V_DIM + cols,)
    seen_kv += (cols < V_DIM,)
    return _Part(q, k, kv, seen, seen_kv, cols < V_DIM, head, head * V_DIM + cols, state, part == 0,
                 (part == 0) & (head % GROUP == 0))  # fmt: skip


@triton.jit
def _load_state(source, has_state, part, i: tl.constexpr):
    """A piece of it."""
    mask = (part.seen_k[i] & has_state)[:, None] & part.seen_v[None, :]
    return tl.load(source + part.state[i], mask=mask, other=0.0)


@triton.jit
def _write_state(source, has_state, written, part, k, v, solved, g, decay, at, begin, edge,
                 PRECISION: tl.constexpr):  # fmt: skip
    """The state at `edge`, if that is after `begin`. It is read again, since few steps do so."""
    since, last = tl.exp(decay.to(tl.float32))[:, None], tl.sum(tl.where(at < edge, g, 0.0), 0)
    left = tl.exp(tl.where(at < edge, (last - decay).to(tl.float32), float("-inf")))[:, None]
    # A loop instead of a branch: as it changes k, what the tensor cores got of k isn't kept in registers for it.
    for _ in range(tl.where(edge > begin, 1, 0)):
        held = tl.zeros(v.shape, tl.float32)
        for i in tl.static_range(len(k)):
            held = tl.dot(k[i], _load_state(source, has_state, part, i), held, input_precision=PRECISION)
        u = tl.dot(solved, v - since * held, input_precision=PRECISION)
        faded = ()
        for i in tl.static_range(len(k)):
            faded += (k[i] * left,)
        k = faded
        for i in tl.static_range(len(k)):
            state = _load_state(source, has_state, part, i) * tl.exp(last.to(tl.float32))
            state = tl.dot(tl.trans(k[i]), u, state, input_precision=PRECISION)
            # Where they are read is where they are written, but not by the same threads.
            tl.debug_barrier()
            tl.store(written + part.state[i], state, mask=part.seen_k[i][:, None] & part.seen_v[None, :])


@triton.jit
def _read(source, has_state, part, q, k, v, taken, since, held, PRECISION: tl.constexpr):
    """What the block's rows find; of what was asked for they have `taken` [new rows, rows].

    Of the state a row reads what its q holds, less what k of the rows before it have overwritten of that.
    """
    found = tl.dot(taken, v, input_precision=PRECISION)
    taken *= since[None, :]
    for i in tl.static_range(len(k)):
        x = q[i] * held[:, None] - tl.dot(taken, k[i], input_precision=PRECISION)
        found = tl.dot(x, _load_state(source, has_state, part, i), found, input_precision=PRECISION)
    return found


@triton.jit
def _run_rows(source, has_state, written, begin, edge, end, rows, part, conv, out, scale, B: tl.constexpr,
              CONV: tl.constexpr, KERNEL: tl.constexpr, PAGE_ROWS: tl.constexpr, HEADS: tl.constexpr, V_DIM: tl.constexpr,
              ROWS: tl.constexpr, NEW: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Rows [begin, end). The state at `edge`, if it is after begin, goes to `written`, outputs of the block to `out`.

    ROWS hold them and the KERNEL - 1 before them. These, and rows after the last, have g = beta = 0: they do nothing.
    """
    at, new = begin + 1 - KERNEL + tl.arange(0, ROWS), end - B + 1 - KERNEL + tl.arange(0, NEW)
    is_new, keeps = (new >= rows.length) & (new < end), (at >= rows.length) & (at < end)
    raw = load_raw(at, at < end, rows, part.kv, part.seen_kv, CONV, KERNEL, PAGE_ROWS)
    raw_q = load_raw(new, (new > begin - KERNEL) & (new < end), rows, part.q, part.seen_k, CONV, KERNEL, PAGE_ROWS)
    g, beta = load_gates(at, rows, part.head, (at >= begin) & (at < end), HEADS, PAGE_ROWS)
    keep_raw(at, keeps & part.is_first_of_key, rows, part.k, part.seen_k, raw[:-1], CONV, PAGE_ROWS)
    keep_raw(at, keeps, rows, part.kv[-1:], part.seen_kv[-1:], raw[-1:], CONV, PAGE_ROWS)
    keep_raw(new, is_new & part.is_first_of_key, rows, part.q, part.seen_k, raw_q, CONV, PAGE_ROWS)
    keep_gates(at, rows, part.head, g, beta, keeps & part.is_first, HEADS, PAGE_ROWS)
    q = at_unit_length(convolve(raw_q, new, part.q, part.seen_k, conv, CONV, KERNEL, PRECISION))
    made = convolve(raw, at, part.kv, part.seen_kv, conv, CONV, KERNEL, PRECISION)
    # Of large sums differences are taken, which are near 0 between rows that forget little.
    k, v, g = at_unit_length(made[:-1]), made[-1], g.to(tl.float64)
    decay = tl.cumsum(g, 0)
    decay_new = tl.sum(tl.where(at[None, :] <= new[:, None], g[None, :], 0.0), 1)
    solved = solve(products(k, k, PRECISION), decay, beta, at, PRECISION)
    seen = products(q, k, PRECISION) * forgotten(decay_new, decay, at[None, :] <= new[:, None]) * scale
    taken, held = tl.dot(seen, solved, input_precision=PRECISION), tl.exp(decay_new.to(tl.float32)) * scale
    found = _read(source, has_state, part, q, k, v, taken, tl.exp(decay.to(tl.float32)), held, PRECISION)
    to = out + (new - rows.length)[:, None] * (HEADS * V_DIM) + part.out[None, :]
    tl.store(to, found, mask=is_new[:, None] & part.seen_v[None, :])
    _write_state(source, has_state, written, part, k, v, solved, g, decay, at, begin, edge, PRECISION)


@triton.jit(do_not_specialize=["layer"])
def _verify(raw, gates, conv, out, recurrent, conv_rows, ring_raw, ring_gates, members, lengths, done, state_len,
            state_in, state_out, ring, layer, raw_stride, gates_stride, beta_stride, recurrent_stride, conv_stride,
            ring_stride, ring_gates_stride, scale, LAYERS: tl.constexpr, PAGE: tl.constexpr, B: tl.constexpr,
            CONV: tl.constexpr, KERNEL: tl.constexpr, PAGE_ROWS: tl.constexpr, RING_PAGES: tl.constexpr,
            HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, K_PAD: tl.constexpr, V_DIM: tl.constexpr,
            COLS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, MAY_BE_MORE: tl.constexpr, NEW: tl.constexpr,
            PIECE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    program, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part = _part_of(program // PARTS, program % PARTS, HEADS, GROUP, K_DIM, K_PAD, V_DIM, COLS, PIECE)
    # Whatever says where things are: after the member all at once, then the things themselves all at once.
    member = tl.load(members + place).to(tl.int64)
    at = member * LAYERS + layer
    live, first, length, edge = find_states(member, lengths, state_len, done, PAGE)
    page, written = tl.load(state_in + at).to(tl.int64), tl.load(state_out + at).to(tl.int64)
    ids = load_ring(ring + at * RING_PAGES, RING_PAGES)
    out += place * (B * HEADS * V_DIM)
    if live:
        source, to = recurrent + page * recurrent_stride, recurrent + written * recurrent_stride
        has_state, begin = (page != 0) & (first > 0), first
        rows = SlotRows(
            ring_pages(ring_raw, ids, ring_stride, CONV, PAGE_ROWS),
            ring_pages(ring_gates, ids, ring_gates_stride, 2 * HEADS, PAGE_ROWS),
            first - first % (PAGE_ROWS * RING_PAGES), raw + place * B * raw_stride, gates + place * B * gates_stride,
            conv_rows + page * conv_stride, has_state, raw_stride, gates_stride, beta_stride, first, length)  # fmt: skip
        is_more = MAY_BE_MORE & (KERNEL - 1 + length + B - first > ROWS)
        # More rows than a chunk holds pass an edge: the state goes there first. Few steps do so. They go through the same
        # code twice, since code of its own takes longer to compile than all the rest. Nothing that rows share is taken
        # out of the loop, where it would lie in registers all along.
        for turn in tl.range(tl.where(is_more, 2, 1), disable_licm=True):
            is_last = (turn > 0) | (is_more == 0)
            end = tl.where(is_last, length + B, edge)
            _run_rows(source, has_state, to, begin, edge, end, rows, part, conv, out, scale, B, CONV, KERNEL, PAGE_ROWS,
                      HEADS, V_DIM, ROWS, NEW, PRECISION)  # fmt: skip
            tl.debug_barrier()
            source, has_state, begin = to, has_state | True, edge
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
    tile: DeltaTile | None = None
    """Else choose_tile says."""


def chunk_sizes(memory: DeltaMemory, block_size: int) -> dict[str, int | bool]:
    """ROWS that a chunk takes, whether there MAY_BE_MORE, and NEW rows that hold a block; each with what is convolved.

    More are taken in two turns, up to the last page edge and from there on.
    """
    before, page, most = memory.state.conv_rows, memory.page_size, memory.ring.num_rows
    rows = padded(max(LEAST, before + page - 1 + block_size, before + (most - block_size) // page * page))
    return {"ROWS": rows, "MAY_BE_MORE": before + most > rows, "NEW": max(LEAST, padded(before + block_size))}


def delta_verify(raw: torch.Tensor, gates: torch.Tensor, rows: BlockRows, site: DeltaSite) -> torch.Tensor:
    """Outputs [N * B, v_heads, v_dim] float32 of the blocks' rows; zeros for slots that are done.

    raw [N * B, conv_dim] of the model's dtype and gates [N * B, 2, v_heads] float32 may be strided. Tables stay as
    they are: see move_states.
    """
    memory, conv, size = site.memory, site.conv, rows.block_size
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
    tile = site.tile or choose_tile(heads * len(rows.members))
    columns, k_pad = max(LEAST, min(tile.columns, padded(form.v_dim))), max(LEAST, padded(form.k_dim))
    parts = cut(form.v_dim, columns)
    # Products are fused with sums here: half of all instructions, and no other code rounds as this does.
    _verify[heads * parts, len(rows.members)](
        raw, gates, conv, out, memory.recurrent, memory.conv, ring_gates=memory.ring_gates, layer=site.layer,
        raw_stride=raw.stride(0), gates_stride=gates.stride(0), beta_stride=gates.stride(1),
        recurrent_stride=memory.recurrent.stride(0), ring_gates_stride=memory.ring_gates.stride(0),
        scale=form.k_dim**-0.5, B=size, HEADS=heads, GROUP=heads // memory.num_k_heads, K_DIM=form.k_dim, K_PAD=k_pad,
        V_DIM=form.v_dim, COLS=columns, PARTS=parts, PIECE=min(tile.piece, k_pad),
        PRECISION=tile.precision or ("tf32" if raw.dtype.itemsize < 4 else "tf32x3"), **chunk_sizes(memory, size), **memory.arguments(rows),
        num_warps=tile.num_warps, num_stages=1, maxnreg=tile.registers,
    )  # fmt: skip
    return out
