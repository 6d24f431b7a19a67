"""Pages of a gated delta net as kernels see them, and how states move on at the end of a step.

A step with the committed length L of a slot whose state stands at s reads rows [s, L) of its rings and writes rows
[L, L + B) of them; if L passed a page edge, its states come to stand at w, the last edge up to L:

    [s, w)       replayed; the state after them is written
    [w, L)       replayed; still in the ring in the next step
    [L, L + B)   the block: computed, and put into the ring

With L - s + B rows at most in a ring, no row that is written has the place of one that is read. s was the last edge
before the previous block, so L - s < page_size + B.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from memsvc.device.delta_limits import MOST_PAGE
from memsvc.device.kernels.launch import launch, padded
from memsvc.device.kernels.places import BlockRows
from memsvc.device.page_view import check_req_kind, page_view
from memsvc.device.ring_pool import RingShape
from memsvc.device.state_pool import StateShape
from memsvc.wire.mem import KindLayout

_COPY, _COPY_WARPS = 2048, 4
"""Of a program that copies inputs of the convolution: channels at a time, and warps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaTables:
    """Where each slot's states and rings are, and how far the states are. All int32, contiguous, on the device.

    state_in and state_len are moved on there (move_states); the host writes a row when a request takes the slot.
    """

    state_in: torch.Tensor
    """[num_slots + 1, layers]: pages that are read; 0 for the zero state."""
    state_out: torch.Tensor
    """[num_slots + 1, layers]: pages that are written; another than state_in after a hit or a freeze."""
    ring: torch.Tensor
    """[num_slots + 1, layers, ring pages]"""
    state_len: torch.Tensor
    """[num_slots + 1]: rows that the states have seen, a multiple of page_size."""


class DeltaMemory:
    """Both kinds of pages over the arena, one view for each part of a page, and the tables."""

    def __init__(
        self,
        arena: torch.Tensor,
        state: tuple[KindLayout, StateShape],
        ring: tuple[KindLayout, RingShape],
        tables: DeltaTables,
        *,
        page_size: int,
    ) -> None:
        """Raises ValueError if a kind and its shape differ, or if states at page edges don't go with such rings."""
        (state_kind, self.state), (ring_kind, self.ring) = state, ring
        check_req_kind(arena, state_kind, self.state.page_bytes, str(self.state))
        check_req_kind(arena, ring_kind, self.ring.page_bytes, str(self.ring))
        if not self.state.conv_rows <= min(page_size, 3):
            raise ValueError(
                f"{self.state.conv_rows} rows before a row are convolved; 3 and a page of {page_size} at most"
            )
        if page_size > MOST_PAGE:
            raise ValueError(
                f"pages of {page_size} tokens, a hybrid's blocks are verified behind an edge of {MOST_PAGE} at most"
            )
        self.page_size = page_size
        self.tables = tables
        form, dtype = self.state, self.state.dtype
        size = form.num_heads * form.k_dim * form.v_dim
        self.recurrent = page_view(arena, state_kind, 0, (size,), form.recurrent_dtype)
        conv = (form.conv_rows * form.conv_dim,)
        self.conv = page_view(arena, state_kind, form.recurrent_bytes, conv, dtype)
        page_rows, gates = self.ring.page_rows, 2 * self.ring.num_heads
        self.ring_gates = page_view(arena, ring_kind, 0, (page_rows * gates,), torch.float32)
        self.ring_raw = page_view(arena, ring_kind, self.ring.gate_bytes, (page_rows * form.conv_dim,), dtype)

    @property
    def num_k_heads(self) -> int:
        """Query heads, and key heads."""
        form = self.state
        return (form.conv_dim - form.num_heads * form.v_dim) // (2 * form.k_dim)

    def check_block(self, block_size: int) -> None:
        """Raise ValueError unless a ring holds all that a step replays and its block."""
        need = self.page_size + 2 * block_size - 1
        if self.ring.num_rows < need:
            raise ValueError(f"blocks of {block_size} rows need rings of {need}, they have {self.ring.num_rows}")

    def arguments(self, rows: BlockRows) -> dict[str, object]:
        """What kernels call by these names, to find slots, rings and their rows."""
        self.check_block(rows.block_size)
        tables, ring = self.tables, self.ring
        return {
            "ring_raw": self.ring_raw, "members": rows.members, "lengths": rows.lengths, "done": rows.done,
            "state_len": tables.state_len, "state_in": tables.state_in, "ring": tables.ring,
            "ring_stride": self.ring_raw.stride(0), "conv_stride": self.conv.stride(0),
            "LAYERS": tables.state_in.shape[1], "PAGE": self.page_size, "CONV": ring.conv_dim,
            "KERNEL": self.state.conv_rows + 1, "PAGE_ROWS": ring.page_rows, "RING_PAGES": ring.num_pages,
        }  # fmt: skip


@triton.jit
def find_states(member, lengths, state_len, done, PAGE: tl.constexpr):
    """(is live, s, L, w) of a slot, see above. Of slot 0 and of a slot that is done no page may be read or written.

    Loads that do not wait for each other.
    """
    live = member != 0
    length = tl.load(lengths + member)
    first = tl.load(state_len + member)
    if done is not None:
        live = live & (tl.load(done + member) == 0)
    return live, first, length, length // PAGE * PAGE


@triton.jit
def load_ring(pages, RING_PAGES: tl.constexpr):
    """Ids int64 of a ring's pages, a tuple; pages: where they begin."""
    ids = (tl.load(pages).to(tl.int64),)
    for i in tl.static_range(1, RING_PAGES):
        ids += (tl.load(pages + i).to(tl.int64),)
    return ids


@triton.jit
def find_ring_row(position, ids, PAGE_ROWS: tl.constexpr, RING_PAGES: tl.constexpr):
    """(page id int64, row of the page) of positions >= 0; ids as load_ring has them."""
    row = position % (PAGE_ROWS * RING_PAGES)
    page = ids[0]
    for i in tl.static_range(1, RING_PAGES):
        page = tl.where(row >= i * PAGE_ROWS, ids[i], page)
    return page, row % PAGE_ROWS


@triton.jit
def _move_inputs(conv_rows, ring_raw, members, lengths, done, state_len, state_in, state_out, ring, ring_stride,
                 conv_stride, LAYERS: tl.constexpr, PAGE: tl.constexpr, CONV: tl.constexpr, KERNEL: tl.constexpr,
                 PAGE_ROWS: tl.constexpr, RING_PAGES: tl.constexpr, COPY: tl.constexpr):  # fmt: skip
    """For a place and a layer."""
    member = tl.load(members + tl.program_id(1)).to(tl.int64)
    live, first, _, edge = find_states(member, lengths, state_len, done, PAGE)
    if live & (edge > first):
        at = member * LAYERS + tl.program_id(0)
        page = tl.load(state_out + at)
        to = conv_rows + page.to(tl.int64) * conv_stride
        ids = load_ring(ring + at * RING_PAGES, RING_PAGES)
        for i in tl.static_range(KERNEL - 1):
            ring_page, row = find_ring_row(edge - (KERNEL - 1) + i, ids, PAGE_ROWS, RING_PAGES)
            source = ring_raw + ring_page * ring_stride + row * CONV
            for begin in range(0, CONV, COPY):
                cols = begin + tl.arange(0, COPY)
                tl.store(to + i * CONV + cols, tl.load(source + cols, mask=cols < CONV), mask=cols < CONV)
        tl.store(state_in + at, page)


@triton.jit
def _move_lengths(members, lengths, done, state_len, PAGE: tl.constexpr):
    member = tl.load(members + tl.program_id(0)).to(tl.int64)
    live, first, _, edge = find_states(member, lengths, state_len, done, PAGE)
    if live & (edge > first):
        tl.store(state_len + member, edge)


def move_states(rows: BlockRows, memory: DeltaMemory) -> None:
    """States that a step wrote are what the next one reads: once a step, after all layers, before lengths change.

    Completes them with the inputs of the convolution. No layer's launch could: with state_in = state_out these lie
    where other programs of that launch read, and all of them read state_len. Nor could one launch do both.
    """
    common = memory.arguments(rows)
    copy = min(_COPY, padded(memory.ring.conv_dim))
    num_layers = memory.tables.state_in.shape[1]
    launch(
        _move_inputs, (num_layers, len(rows.members)), _COPY_WARPS, memory.conv, state_out=memory.tables.state_out,
        COPY=copy, **common,
    )  # fmt: skip
    launch(
        _move_lengths, (len(rows.members),), 1, rows.members, rows.lengths, rows.done, memory.tables.state_len,
        PAGE=memory.page_size,
    )  # fmt: skip
