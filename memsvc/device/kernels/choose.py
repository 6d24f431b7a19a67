"""Which of a few candidates a row takes: memsvc.device.sampling.choose inside a kernel."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from memsvc.device.kernels.row_tiles import INT_MAX, INT_MIN, divided, is_finite, nan_max, order_key
from memsvc.device.kernels.slot_fields import (
    MIN_P,
    TEMPERATURE,
    TOP_K,
    changes_logits,
    field,
    float_field,
    has_filter,
    has_penalty,
    penalise,
    top_p_of,
    withhold,
    withholds,
)


@triton.jit
def adjust_candidates(x, ids, inside, picks, row, slot):
    """Scores after penalties and min_tokens; picks: tokens of the rows before, -1 behind them."""
    if has_penalty(slot):
        more = tl.sum((ids[:, None] == picks[None, :]).to(tl.int32), 1)
        x = penalise(x, ids, inside, slot, more)
    if withholds(slot, row):
        x = withhold(x, ids, slot)
    return x


@triton.jit
def filter_candidates(x, inside, slot, K: tl.constexpr, K_PAD: tl.constexpr):
    """Which candidates top_k, top_p and min_p leave, of scaled scores x; of equals the first go first."""
    places = tl.arange(0, K_PAD)
    top = nan_max(x, 0)
    kept = inside
    if is_finite(top):
        k = field(slot, TOP_K)
        above = (x[None, :] > x[:, None]) & inside[None, :]
        kept = kept & ((tl.sum(above.to(tl.int32), 1) < k) | ((places >= 0) & (k <= 0)))
        weights = tl.exp(x - top)
        top_p = top_p_of(slot)
        if top_p < 1.0:
            wide = tl.where(kept, weights, 0.0).to(tl.float64)
            earlier = (places[None, :] < places[:, None]) & (weights[None, :] == weights[:, None])
            before = ((weights[None, :] > weights[:, None]) | earlier) & kept[None, :]
            mass = tl.sum(tl.where(before, wide[None, :], 0.0), 1)
            is_first = tl.sum(before.to(tl.int32), 1) == 0
            kept = kept & (is_first | (mass < top_p * tl.sum(wide, 0)))
        kept = kept & (weights >= float_field(slot, MIN_P))
    else:
        keys = tl.where(inside & (x == x), order_key(x), INT_MIN)
        kept = places == tl.min(tl.where(keys == tl.max(keys, 0), places, K_PAD), 0)
    return kept


@triton.jit
def lowest_of_best(times, ids, inside):
    """The lowest id among the smallest times; the lowest of all if one of them is no number."""
    broken = tl.max((inside & (times != times)).to(tl.int32), 0) > 0
    least = tl.min(tl.where(inside & (times == times), times, float("inf")), 0)
    tied = tl.where(broken, 0.0, tl.where(times == least, 0.0, 1.0)) == 0.0
    return tl.min(tl.where(inside & tied, ids, INT_MAX), 0)


@triton.jit
def choose(scores, ids, inside, noise, picks, row, slot, K: tl.constexpr, K_PAD: tl.constexpr):
    """The token that row `row` of a block takes; scores float32, ids int32, E float32, all [K_PAD]."""
    temperature = float_field(slot, TEMPERATURE)
    x = tl.where(inside, scores, float("-inf"))
    if changes_logits(slot, row):
        x = adjust_candidates(x, ids, inside, picks, row, slot)
    times = -x.to(tl.float64)
    if temperature > 0.0:
        x = divided(x, temperature)
        if has_filter(slot):
            x = tl.where(filter_candidates(x, inside, slot, K, K_PAD), x, float("-inf"))
        times = noise.to(tl.float64) * tl.exp(nan_max(x, 0).to(tl.float64) - x.to(tl.float64))
    return lowest_of_best(times, ids, inside)
