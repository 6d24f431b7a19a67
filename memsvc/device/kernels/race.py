"""From the block summaries of a verify's rows to their tokens: the exponential race, or the argmax at temperature 0.

A block cannot give a smaller E / p than its smallest E over its largest p; the owners of the blocks' smallest E
are runners themselves. So only blocks whose bound is below the best runner so far are looked at, the most
promising first, until none is left: one to a few dozen of a thousand. Several programs share the blocks of a row;
the one that ends last compares what they found.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import triton
import triton.language as tl

from memsvc.device.kernels.filters import survives
from memsvc.device.kernels.noise import BLOCK_SIZE, block_noise, token_noise
from memsvc.device.kernels.row_tiles import INT_MAX, INT_MIN, Row, divided, is_finite, nan_max, order_key, row_logits
from memsvc.device.kernels.slot_fields import (
    DONE,
    MIN_P,
    NUM_TOKENS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    Sizes,
    Slot,
    field,
    float_field,
    has_filter,
)

_SLACK = tl.constexpr(1.0 - 1e-12)
"""Bounds are loosened by this, so that rounding can only let more blocks into the race."""


class Cuts(NamedTuple):
    """What the filters of a row leave; see filters.survives."""

    active: tl.tensor
    top: tl.tensor
    """Its largest scaled logit."""
    least: tl.tensor
    weight: tl.tensor
    last: tl.tensor
    min_p: tl.tensor


@triton.jit
def argmax_of_row(row, maxima, num_blocks, BLOCKS: tl.constexpr):
    """The token with the largest logit, of equals the lowest id; a NaN is larger than anything."""
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    keys = tl.where(inside, order_key(tl.load(maxima + blocks, mask=inside, other=0.0)), INT_MIN)
    block = tl.min(tl.where(keys == tl.max(keys, 0), blocks, BLOCKS), 0)
    ids = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    keys = tl.where(ids < row.vocab, order_key(row_logits(row, ids, ids < row.vocab)), INT_MIN)
    return tl.min(tl.where(keys == tl.max(keys, 0), ids, INT_MAX), 0)


@triton.jit
def times_of(noise, scaled, ids, cuts):
    """Finishing times float64: E / p up to a factor of the row, inf for tokens that may not be chosen."""
    times = noise.to(tl.float64) * tl.exp(cuts.top.to(tl.float64) - scaled.to(tl.float64))
    if cuts.active:
        kept = survives(scaled, ids, cuts.top, cuts.least, cuts.weight, cuts.last, cuts.min_p)
        times = tl.where(kept, times, float("inf"))
    return times


@triton.jit
def first_bound(row, maxima, smallest, owned, num_blocks, temperature, cuts, BLOCKS: tl.constexpr):
    """The best time among the owners of the blocks' smallest E."""
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    scaled = divided(tl.load(owned + blocks, mask=inside, other=float("-inf")), temperature)
    slot = row.slot
    _, owner = block_noise(blocks, field(slot, NUM_TOKENS) + row.place, field(slot, SEED_LOW), field(slot, SEED_HIGH))
    times = times_of(tl.load(smallest + blocks, mask=inside, other=1.0), scaled, owner, cuts)
    return tl.min(tl.where(inside & (owner < row.vocab), times, float("inf")), 0)


@triton.jit
def run_share(row, maxima, smallest, bound, share, num_blocks, temperature, cuts, SHARE: tl.constexpr,
              SPLITS: tl.constexpr):  # fmt: skip
    """(time float64, token) of the winner among blocks share, share + SPLITS, ...; inf if none can beat the bound."""
    slot = row.slot
    position = field(slot, NUM_TOKENS) + row.place
    low, high = field(slot, SEED_LOW), field(slot, SEED_HIGH)
    places = tl.arange(0, SHARE)
    blocks = share + SPLITS * places
    inside = blocks < num_blocks
    tops = divided(tl.load(maxima + blocks, mask=inside, other=float("-inf")), temperature)
    # INT_MIN as the id: of a block with a token at the last weight, some id may be low enough.
    bounds = times_of(
        tl.load(smallest + blocks, mask=inside, other=1.0), tops, tl.full([SHARE], INT_MIN, tl.int32), cuts
    )
    bounds = tl.where(inside, bounds * _SLACK, float("inf"))
    best, winner = tl.full([], float("inf"), tl.float64), tl.full([], INT_MAX, tl.int32)
    next_bound = tl.min(bounds, 0)
    while (next_bound < float("inf")) & (next_bound <= bound):
        place = tl.min(tl.where(bounds == next_bound, places, SHARE), 0)
        block = share + SPLITS * place
        ids = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        least, owner = block_noise(block, position, low, high)
        noise = token_noise(ids, least, owner, position, low, high)
        scaled = divided(row_logits(row, ids, ids < row.vocab), temperature)
        times = tl.where(ids < row.vocab, times_of(noise, scaled, ids, cuts), float("inf"))
        time = tl.min(times, 0)
        token = tl.min(tl.where(times == time, ids, INT_MAX), 0)
        better = (time < best) | ((time == best) & (token < winner))
        best, winner = tl.where(better, time, best), tl.where(better, token, winner)
        bound = tl.minimum(bound, best)
        bounds = tl.where(places == place, float("inf"), bounds)
        next_bound = tl.min(bounds, 0)
    return best, winner


@triton.jit
def settle(time, token, index, share, times, winners, arrived, tokens, SPLITS: tl.constexpr):
    """Store the row's token once all its programs are here. arrived is 0 again then."""
    if SPLITS == 1:
        tl.store(tokens + index, token)
    else:
        tl.store(times + index * SPLITS + share, time)
        tl.store(winners + index * SPLITS + share, token)
        tl.debug_barrier()
        if tl.atomic_add(arrived + index, 1) == SPLITS - 1:
            places = index * SPLITS + tl.arange(0, SPLITS)
            found = tl.load(times + places, volatile=True)
            ids = tl.load(winners + places, volatile=True)
            tl.store(tokens + index, tl.min(tl.where(found == tl.min(found, 0), ids, INT_MAX), 0))
            tl.store(arrived + index, 0)


@triton.jit(do_not_specialize=["rows_each"])
def race(logits, row_stride, col_stride, vocab, members, words, counts, maxima, smallest, owned, num_blocks, least,
         weight, last, times, winners, arrived, tokens, rows_each, STRIDE: tl.constexpr,
         DRAFTS_AT: tl.constexpr, DRAFT_WIDTH: tl.constexpr, STOPS_AT: tl.constexpr, SEEN_AT: tl.constexpr,
         COUNT_WIDTH: tl.constexpr, BLOCKS: tl.constexpr, SHARE: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Program (s, r): share s of row r; its token goes to tokens int32 [rows]. Slots that are done get 0."""
    share, index = tl.program_id(0), tl.program_id(1)
    slot = Slot(words, counts, tl.load(members + index // rows_each),
                Sizes(STRIDE, DRAFTS_AT, DRAFT_WIDTH, STOPS_AT, SEEN_AT, COUNT_WIDTH))  # fmt: skip
    far = index.to(tl.int64)
    row = Row(logits + far * row_stride, col_stride, vocab, slot, index % rows_each)
    maxima, smallest, owned = maxima + far * num_blocks, smallest + far * num_blocks, owned + far * num_blocks
    temperature = float_field(slot, TEMPERATURE)
    if field(slot, DONE) != 0:
        if share == 0:
            tl.store(tokens + index, 0)
    elif temperature == 0.0:
        if share == 0:
            tl.store(tokens + index, argmax_of_row(row, maxima, num_blocks, BLOCKS))
    else:
        blocks = tl.arange(0, BLOCKS)
        top = nan_max(tl.load(maxima + blocks, mask=blocks < num_blocks, other=float("-inf")), 0)
        top = divided(top, temperature)
        active = has_filter(slot)
        inf = tl.full([], float("inf"), tl.float32)
        cuts = Cuts(active, top, -inf, -inf, tl.full([], INT_MAX, tl.int32), -inf)
        if active:
            cuts = Cuts(active, top, tl.load(least + index), tl.load(weight + index), tl.load(last + index),
                        float_field(slot, MIN_P))  # fmt: skip
        if is_finite(top):
            bound = first_bound(row, maxima, smallest, owned, num_blocks, temperature, cuts, BLOCKS)
            time, token = run_share(row, maxima, smallest, bound, share, num_blocks, temperature, cuts, SHARE, SPLITS)
            settle(time, token, index, share, times, winners, arrived, tokens, SPLITS)
        elif share == 0:
            tl.store(tokens + index, tl.where(active, cuts.last, 0))
