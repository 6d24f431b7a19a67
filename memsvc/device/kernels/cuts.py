"""One program a row: what its filters leave. Rows without filters end at once."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from memsvc.device.kernels.filters import (
    Ranking,
    block_ranks,
    find_cut,
    halve,
    nth_of_rank,
    within,
)
from memsvc.device.kernels.noise import BLOCK_SIZE
from memsvc.device.kernels.row_tiles import (
    INT_MAX,
    INT_MIN,
    Row,
    divided,
    is_finite,
    key_value,
    nan_max,
    order_key,
    row_logits,
)
from memsvc.device.kernels.slot_fields import DONE, TEMPERATURE, TOP_K, Sizes, Slot, field, float_field, has_filter
from memsvc.device.kernels.slot_fields import top_p_of as top_p_field

_LOWEST_KEY = tl.constexpr(-2139095041)
"""order_key(-inf)"""
_ONE_BITS = tl.constexpr(0x3F800000)
_LEAST_GOAL = tl.constexpr(1e-300)
"""top_p 0 keeps one token, as the smallest share does."""


@triton.jit
def _top_k_cut(ranking, k, room, BLOCKS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr):
    """The k-th largest scaled logit."""
    low = tl.full([], _LOWEST_KEY, tl.int64)
    high = tl.max(block_ranks(ranking, 0, BLOCKS, False), 0).to(tl.int64) + 1
    goal = k.to(tl.float64)
    if k <= ranking.num_blocks:
        # k blocks have a maximum of at least the k-th largest block maximum, so that bounds the cut from below.
        nothing = tl.full([], 0.0, tl.float64)
        low, _ = halve(block_ranks(ranking, 0, BLOCKS, False), nothing, goal, low, high, False)
    rank, _, _ = find_cut(ranking, low, high, goal, room, False, TILE, ROOM)
    return key_value(rank.to(tl.int32))


@triton.jit
def _top_p_cut(ranking, top_p, room, TILE: tl.constexpr, ROOM: tl.constexpr):
    """(weight, last id): tokens heavier than weight, and those of that weight with ids up to last, are kept."""
    _, total = within(ranking, 0, INT_MAX, True, TILE)
    goal = tl.maximum(top_p * total, _LEAST_GOAL)
    # Tokens lighter than this are together less than what top_p leaves out.
    bound = tl.maximum((1.0 - top_p) * total * 0.5 / ranking.row.vocab.to(tl.float64), 0.0)
    low = tl.minimum(bound, 1.0).to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    high = tl.full([], _ONE_BITS + 1, tl.int64)
    rank, above, num = find_cut(ranking, low, high, goal, room, True, TILE, ROOM)
    weight = rank.to(tl.int32).to(tl.float32, bitcast=True)
    wide = tl.maximum(weight.to(tl.float64), _LEAST_GOAL)
    wanted = tl.ceil(tl.minimum((goal - above) / wide, num.to(tl.float64)))
    wanted = tl.where(above + (wanted - 1.0) * wide >= goal, wanted - 1.0, wanted)
    wanted = tl.where(above + wanted * wide >= goal, wanted, wanted + 1.0)
    kept = tl.maximum(wanted, 1.0).to(tl.int32)
    last = tl.full([], INT_MAX, tl.int32)
    if kept < num:
        last = nth_of_rank(ranking, rank.to(tl.int32), kept, True, TILE)
    return weight, last


@triton.jit
def _largest_number(row, temperature, num_tiles, TILE: tl.constexpr):
    """The id with the largest scaled logit that is a number, the lowest of equals; 0 if none is."""
    best, found = INT_MIN + 1, 0
    for tile in range(0, num_tiles):
        ids = tile * (TILE * BLOCK_SIZE) + tl.arange(0, TILE * BLOCK_SIZE)
        scaled = divided(row_logits(row, ids, ids < row.vocab), temperature)
        keys = tl.where((ids < row.vocab) & (scaled == scaled), order_key(scaled), INT_MIN)
        top = tl.max(keys, 0)
        first = tl.min(tl.where(keys == top, ids, INT_MAX), 0)
        found = tl.where(top > best, first, found)
        best = tl.maximum(top, best)
    return found


@triton.jit(do_not_specialize=["rows_each"])
def cut(logits, row_stride, col_stride, vocab, members, words, counts, maxima, num_blocks, least, weight, last, room,
        rows_each, STRIDE: tl.constexpr, DRAFTS_AT: tl.constexpr, DRAFT_WIDTH: tl.constexpr,
        STOPS_AT: tl.constexpr, SEEN_AT: tl.constexpr, COUNT_WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
        TILE: tl.constexpr, ROOM: tl.constexpr):  # fmt: skip
    """Row r: least, weight, last [rows] of filters.survives. If its largest logit is infinite or NaN, last is its token.

    room: int32 [rows, ROOM]. BLOCKS: num_blocks or more, a power of two.
    """
    index = tl.program_id(0)
    slot = Slot(words, counts, tl.load(members + index // rows_each),
                Sizes(STRIDE, DRAFTS_AT, DRAFT_WIDTH, STOPS_AT, SEEN_AT, COUNT_WIDTH))  # fmt: skip
    temperature = float_field(slot, TEMPERATURE)
    if (field(slot, DONE) == 0) & (temperature > 0.0) & has_filter(slot):
        row = Row(logits + index.to(tl.int64) * row_stride, col_stride, vocab, slot, index % rows_each)
        row_maxima = maxima + index.to(tl.int64) * num_blocks
        blocks = tl.arange(0, BLOCKS)
        largest = tl.load(row_maxima + blocks, mask=blocks < num_blocks, other=float("-inf"))
        top = divided(nan_max(largest, 0), temperature)
        from_least, from_weight = tl.full([], float("-inf"), tl.float32), tl.full([], -1.0, tl.float32)
        to_last = tl.full([], INT_MAX, tl.int32)
        own_room = room + index.to(tl.int64) * ROOM
        if is_finite(top):
            k = field(slot, TOP_K)
            if (k > 0) & (k < vocab):
                ranking = Ranking(row, row_maxima, num_blocks, temperature, top, from_least)
                from_least = _top_k_cut(ranking, k, own_room, BLOCKS, TILE, ROOM)
            top_p = top_p_field(slot)
            if top_p < 1.0:
                ranking = Ranking(row, row_maxima, num_blocks, temperature, top, from_least)
                from_weight, to_last = _top_p_cut(ranking, top_p, own_room, TILE, ROOM)
        else:
            to_last = _largest_number(row, temperature, tl.cdiv(num_blocks, TILE), TILE)
        tl.store(least + index, from_least)
        tl.store(weight + index, from_weight)
        tl.store(last + index, to_last)
