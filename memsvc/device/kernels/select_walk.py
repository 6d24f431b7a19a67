"""From the best candidates of k draft rows to k drafts: the selector's scores, then a walk from left to right.

As draft_worker's CandidateSelector and CoupledChoice: score(p -> c) = unary[c] + sum over r of predecessor[p, r] *
hidden[r] * successor[c, r] for every candidate p of the row before, all rows at once; then each row takes one of its
candidates after the one taken before it, by the slot's own sampling parameters and with the noise of its position.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.choose import choose
from memsvc.device.kernels.launch import launch, padded
from memsvc.device.kernels.noise import BLOCK_SIZE, block_noise, token_noise
from memsvc.device.kernels.row_tiles import INT_MAX
from memsvc.device.kernels.slot_fields import (
    ANCHOR,
    DONE,
    NUM_DRAFTS,
    NUM_TOKENS,
    SEED_HIGH,
    SEED_LOW,
    Sizes,
    Slot,
    SlotOperands,
    field,
    set_field,
)
from memsvc.device.slots import SlotState

MAX_RANK_TILE = 128
"""Ranks that are multiplied in one piece: 64 to 256."""
LATTICE_WARPS, WALK_WARPS = 4, 1
_LEAST_CANDIDATES = 16
"""Rows that tl.dot needs at least; candidates are padded to it."""


@dataclass(frozen=True, slots=True)
class SelectorTables:
    """What scores a candidate by the token before it."""

    hidden: torch.Tensor
    """[N, k, R]: hidden_projection z, last dimension contiguous."""
    predecessor: torch.Tensor
    """[V, R], contiguous"""
    successor: torch.Tensor
    """[V, R], contiguous"""


@triton.jit
def score_rows(unary, ids, hidden, hidden_place, hidden_row, predecessor, successor, members, words, counts, lattice,
               NUM: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
               STRIDE: tl.constexpr, DRAFTS_AT: tl.constexpr, DRAFT_WIDTH: tl.constexpr, STOPS_AT: tl.constexpr,
               SEEN_AT: tl.constexpr, COUNT_WIDTH: tl.constexpr):  # fmt: skip
    """Program (i, t): lattice float32 [N, NUM, K_PAD before, K_PAD] of row t of place i."""
    place, row = tl.program_id(0), tl.program_id(1)
    slot = Slot(words, counts, tl.load(members + place),
                Sizes(STRIDE, DRAFTS_AT, DRAFT_WIDTH, STOPS_AT, SEEN_AT, COUNT_WIDTH))  # fmt: skip
    if field(slot, DONE) == 0:
        places = tl.arange(0, K_PAD)
        inside = places < K
        at = (place * NUM + row) * K + places
        after = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
        before = tl.load(ids + at - K, mask=inside & (row > 0), other=0).to(tl.int64)
        # Before row 0 stands the anchor, whatever was picked before.
        before += tl.where(row > 0, 0, field(slot, ANCHOR))
        scores = tl.zeros([K_PAD, K_PAD], tl.float32)
        for start in range(0, RANK, TILE):
            ranks = start + tl.arange(0, TILE)
            seen = inside[:, None] & (ranks < RANK)[None, :]
            r = tl.load(hidden + place * hidden_place + row * hidden_row + ranks, mask=ranks < RANK, other=0.0)
            queries = tl.load(predecessor + before[:, None] * RANK + ranks[None, :], mask=seen, other=0.0)
            keys = tl.load(successor + after[:, None] * RANK + ranks[None, :], mask=seen, other=0.0)
            queries = queries.to(tl.float32) * r.to(tl.float32)[None, :]
            scores += tl.dot(queries, tl.trans(keys.to(tl.float32)), input_precision="ieee")
        scores += tl.load(unary + at, mask=inside, other=0.0)[None, :]
        out = (place * NUM + row).to(tl.int64) * (K_PAD * K_PAD)
        tl.store(lattice + out + places[:, None] * K_PAD + places[None, :], scores)


@triton.jit
def row_of(tile, rows, row):
    """Row `row` of a tile of two dimensions."""
    return tl.sum(tl.where((rows == row)[:, None], tile, 0), 0)


@triton.jit
def walk_rows(unary, ids, lattice, members, words, counts, NUM: tl.constexpr, NUM_PAD: tl.constexpr, K: tl.constexpr,
              K_PAD: tl.constexpr, HAS_LATTICE: tl.constexpr, STRIDE: tl.constexpr, DRAFTS_AT: tl.constexpr,
              DRAFT_WIDTH: tl.constexpr, STOPS_AT: tl.constexpr, SEEN_AT: tl.constexpr,
              COUNT_WIDTH: tl.constexpr):  # fmt: skip
    """Program i: drafts and num_drafts of place i's slot. A slot that is done gets none."""
    place = tl.program_id(0)
    slot = Slot(words, counts, tl.load(members + place),
                Sizes(STRIDE, DRAFTS_AT, DRAFT_WIDTH, STOPS_AT, SEEN_AT, COUNT_WIDTH))  # fmt: skip
    num = 0
    if field(slot, DONE) == 0:
        num = NUM
        places, rows = tl.arange(0, K_PAD), tl.arange(0, NUM_PAD)
        inside = places < K
        at = (place * NUM + rows)[:, None] * K + places[None, :]
        there = (rows < NUM)[:, None] & inside[None, :]
        tokens = tl.load(ids + at, mask=there, other=0).to(tl.int32)
        low, high = field(slot, SEED_LOW), field(slot, SEED_HIGH)
        positions = (field(slot, NUM_TOKENS) + rows)[:, None] + tl.zeros_like(tokens)
        least, owner = block_noise(tokens // BLOCK_SIZE, positions, low, high)
        noise = token_noise(tokens, least, owner, positions, low, high)
        picks = tl.full([NUM_PAD], -1, tl.int32)
        before = 0
        for row in range(0, NUM):
            if HAS_LATTICE:
                scores = tl.load(lattice + ((place * NUM + row).to(tl.int64) * K_PAD + before) * K_PAD + places)
            else:
                scores = tl.load(unary + (place * NUM + row) * K + places, mask=inside, other=0.0)
            mine = row_of(tokens, rows, row)
            token = choose(scores, mine, inside, row_of(noise, rows, row), picks, row, slot, K, K_PAD)
            before = tl.min(tl.where(inside & (mine == token), places, INT_MAX), 0)
            picks = tl.where(rows == row, token, picks)
        tl.store(words + DRAFTS_AT + slot.number * DRAFT_WIDTH + rows, picks, mask=rows < NUM)
    set_field(slot, num, NUM_DRAFTS)


def select_walk(
    unary: torch.Tensor,
    ids: torch.Tensor,
    members: torch.Tensor,
    slots: SlotState,
    tables: SelectorTables | None = None,
) -> None:
    """Write k drafts into the slot of each member, from its rows' best logits unary float32 and token ids [N, k, K].

    ids int32 or int64, distinct in a row; both contiguous. The anchors are the slots' own. tables: the selector of
    DFlash2; without, candidates are ranked by their logits alone, and K may be 1. Equal scores go to the lowest id.
    """
    num_places, num, k = ids.shape
    if num > slots.layout.block_size - 1:
        raise ValueError(f"{num} drafts for blocks of {slots.layout.block_size}")
    assert unary.is_contiguous(), f"strides {unary.stride()}"
    assert ids.is_contiguous(), f"strides {ids.stride()}"
    k_pad, operands = max(_LEAST_CANDIDATES, padded(k)), SlotOperands.of(slots)
    sizes = {"NUM": num, "K": k, "K_PAD": k_pad, **operands.sizes}
    lattice = unary
    if tables is not None:
        rank, hidden = tables.predecessor.shape[1], tables.hidden
        lattice = torch.empty((num_places, num, k_pad, k_pad), dtype=torch.float32, device=ids.device)
        launch(
            score_rows, (num_places, num), LATTICE_WARPS, unary, ids, hidden, *hidden.stride()[:2],
            tables.predecessor, tables.successor, members, operands.words, operands.counts, lattice, RANK=rank,
            TILE=max(16, min(MAX_RANK_TILE, padded(rank))), **sizes,
        )  # fmt: skip
    launch(
        walk_rows, (num_places,), WALK_WARPS, unary, ids, lattice, members, operands.words, operands.counts,
        NUM_PAD=max(2, padded(num)), HAS_LATTICE=tables is not None, **sizes,
    )  # fmt: skip
