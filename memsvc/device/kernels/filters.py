"""top_k, top_p and min_p as cuts of a row, as memsvc.device.filters makes them, without sorting.

A filter keeps the tokens down to some rank: of scaled logits for top_k, of weights exp(scaled - largest) for
top_p. Of those that share the last rank top_p keeps the lowest ids. So three numbers say what a row keeps:
a token survives if its scaled logit is at least `least`, its weight more than `weight`, or equal to it and its
id at most `last`, and its weight at least min_p. The rank is found by halving an interval of the bits of floats,
over the parts of the row that reach into it, and when few tokens are left in it, over a list of them.

BY_WEIGHT says which rank is meant; a tile, TILE blocks, is the part of a row that is looked at in one piece.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import triton
import triton.language as tl

from memsvc.device.kernels.noise import BLOCK_SIZE
from memsvc.device.kernels.row_tiles import INT_MIN, Row, divided, order_key, row_logits


class Ranking(NamedTuple):
    """How tokens of a row are ranked."""

    row: Row
    maxima: tl.tensor
    """Address of the largest logits of its blocks."""
    num_blocks: tl.tensor
    temperature: tl.tensor
    top: tl.tensor
    """Its largest scaled logit."""
    least: tl.tensor
    """Scaled logits under this were dropped by top_k."""


@triton.jit
def survives(scaled, ids, top, least, weight, last, min_p):
    """Which tokens the cuts of a row leave, from their scaled logits; top: the largest of the row."""
    weights = tl.exp(scaled - top)
    kept = (weights > weight) | ((weights == weight) & (ids <= last))
    return kept & (scaled >= least) & (weights >= min_p)


@triton.jit
def ranks_of(x, inside, ranking, BY_WEIGHT: tl.constexpr):
    """int32: what a filter orders logits by. INT_MIN outside, -1 for weights of tokens that top_k dropped."""
    scaled = divided(x, ranking.temperature)
    if BY_WEIGHT:
        bits = tl.exp(scaled - ranking.top).to(tl.int32, bitcast=True)
        ranks = tl.where(scaled >= ranking.least, bits, -1)
    else:
        ranks = order_key(scaled)
    return tl.where(inside, ranks, INT_MIN)


@triton.jit
def masses(ranks, BY_WEIGHT: tl.constexpr):
    """float64: what tokens of these ranks count for."""
    if BY_WEIGHT:
        return ranks.to(tl.float32, bitcast=True).to(tl.float64)
    else:
        return tl.full(ranks.shape, 1.0, tl.float64)


@triton.jit
def block_ranks(ranking, first, NUM: tl.constexpr, BY_WEIGHT: tl.constexpr):
    """Ranks of the largest logits of blocks [first, first + NUM)."""
    blocks = first + tl.arange(0, NUM)
    inside = blocks < ranking.num_blocks
    return ranks_of(tl.load(ranking.maxima + blocks, mask=inside, other=float("-inf")), inside, ranking, BY_WEIGHT)


@triton.jit
def tile_ranks(ranking, tile, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """(ids, ranks) of a tile."""
    ids = tile * (TILE * BLOCK_SIZE) + tl.arange(0, TILE * BLOCK_SIZE)
    inside = ids < ranking.row.vocab
    return ids, ranks_of(row_logits(ranking.row, ids, inside), inside, ranking, BY_WEIGHT)


@triton.jit
def reaches(ranking, tile, low, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """Some token of the tile has a rank of at least low."""
    return tl.max(block_ranks(ranking, tile * TILE, TILE, BY_WEIGHT), 0) >= low


@triton.jit
def within(ranking, low, high, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """(number int32, mass float64) of the tokens with ranks in [low, high)."""
    num, mass = tl.zeros([TILE * BLOCK_SIZE], tl.int32), tl.zeros([TILE * BLOCK_SIZE], tl.float64)
    for tile in range(0, tl.cdiv(ranking.num_blocks, TILE)):
        if reaches(ranking, tile, low, BY_WEIGHT, TILE):
            _, ranks = tile_ranks(ranking, tile, BY_WEIGHT, TILE)
            here = (ranks >= low) & (ranks < high)
            num += here.to(tl.int32)
            mass += tl.where(here, masses(ranks, BY_WEIGHT), 0.0)
    return tl.sum(num, 0), tl.sum(mass, 0)


@triton.jit
def halve(ranks, above, goal, low, high, BY_WEIGHT: tl.constexpr):
    """(rank int64, mass above it): the largest rank of [low, high) whose mass and that above reach goal."""
    while high - low > 1:
        middle = low + (high - low) // 2
        upper = (ranks >= middle.to(tl.int32)) & (ranks < high.to(tl.int32))
        mass = tl.sum(tl.where(upper, masses(ranks, BY_WEIGHT), 0.0), 0)
        enough = above + mass >= goal
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        above = tl.where(enough, above, above + mass)
    return low, above


@triton.jit
def listed(ranking, low, high, room, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr):
    """Ranks [ROOM] of the tokens with ranks in [low, high), of which there are no more, INT_MIN behind them."""
    num = 0
    for tile in range(0, tl.cdiv(ranking.num_blocks, TILE)):
        if reaches(ranking, tile, low, BY_WEIGHT, TILE):
            _, ranks = tile_ranks(ranking, tile, BY_WEIGHT, TILE)
            here = ((ranks >= low) & (ranks < high)).to(tl.int32)
            places = num + tl.cumsum(here, 0) - 1
            tl.store(room + places, ranks, mask=(here > 0) & (places < ROOM))
            num += tl.sum(here, 0)
    # What other threads stored is read next.
    tl.debug_barrier()
    places = tl.arange(0, ROOM)
    return tl.load(room + places, mask=places < num, other=INT_MIN)


@triton.jit
def find_cut(ranking, low, high, goal, room, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr):
    """(rank int64, mass above it, number of tokens that have it): the largest whose mass and that above reach goal.

    low and high int64: the mass of ranks from low on reaches goal, from high on there is none.
    """
    above = tl.full([], 0.0, tl.float64)
    num, _ = within(ranking, low.to(tl.int32), high.to(tl.int32), BY_WEIGHT, TILE)
    while (num > ROOM) & (high - low > 1):
        middle = low + (high - low) // 2
        more, mass = within(ranking, middle.to(tl.int32), high.to(tl.int32), BY_WEIGHT, TILE)
        enough = above + mass >= goal
        num = tl.where(enough, more, num - more)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        above = tl.where(enough, above, above + mass)
    if high - low > 1:
        ranks = listed(ranking, low.to(tl.int32), high.to(tl.int32), room, BY_WEIGHT, TILE, ROOM)
        low, above = halve(ranks, above, goal, low, high, BY_WEIGHT)
        num = tl.sum((ranks == low.to(tl.int32)).to(tl.int32), 0)
    return low, above, num


@triton.jit
def nth_of_rank(ranking, rank, n, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """Id of the n-th token, from 1, in the order of ids, of those that have this rank. There must be so many."""
    seen, found = 0, 0
    for tile in range(0, tl.cdiv(ranking.num_blocks, TILE)):
        if (seen < n) & reaches(ranking, tile, rank, BY_WEIGHT, TILE):
            ids, ranks = tile_ranks(ranking, tile, BY_WEIGHT, TILE)
            here = (ranks == rank).to(tl.int32)
            places = seen + tl.cumsum(here, 0)
            found = tl.max(tl.where((here > 0) & (places == n), ids, found), 0)
            seen += tl.sum(here, 0)
    return found
