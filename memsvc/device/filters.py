"""top_k, top_p and min_p: which tokens stay in the race, exactly, without sorting a vocabulary."""

import numpy as np

from memsvc.wire.text import Sampling

_CUT_STEP = 2.0**-3
"""top_p looks for its cut in rings of weights, each this much lighter than the one before."""
_LIGHTEST = 2.0**-100


def survivors(params: Sampling, scaled: np.ndarray, block_max: np.ndarray) -> np.ndarray:
    """Indices, ascending, of the scaled logits (float32 [vocab], temperature applied) that may be chosen.

    In this order, each over what the one before left: top_k keeps the k largest and their ties; top_p
    keeps the fewest largest whose share reaches top_p, of equals the lower id first; min_p keeps those
    with at least min_p times the largest probability. Never empty: of logits that are not numbers the
    largest that is one stays, else the first. block_max: maxima of equal runs of `scaled`.
    """
    top = block_max.max()
    if not np.isfinite(top):
        return np.array([np.nan_to_num(scaled, nan=-np.inf).argmax()])
    ids = None
    weights = scaled
    if 0 < params.top_k < len(scaled):
        ids = _top_k(scaled, block_max, params.top_k)
        weights = scaled[ids]
    weights = np.exp(weights - top)
    if params.top_p < 1.0:
        kept = _top_p(weights, params.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(params.min_p))
        ids = kept if ids is None else ids[kept]
    return np.arange(len(scaled)) if ids is None else ids


def _top_k(scaled: np.ndarray, block_max: np.ndarray, k: int) -> np.ndarray:
    # k blocks have a maximum of at least the k-th largest block maximum, so that bounds the cut from below.
    bound = _kth_largest(block_max, k) if k <= len(block_max) else -np.inf
    ids = np.flatnonzero(scaled >= bound)
    values = scaled[ids]
    return ids[values >= _kth_largest(values, k)]


def _kth_largest(values: np.ndarray, k: int) -> np.float32:
    return np.partition(values, len(values) - k)[len(values) - k]


def _top_p(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Positions, ascending, of the fewest largest weights whose sum reaches top_p of the whole.

    The largest weight is 1. Whole rings are taken until one would pass the goal; only that one is sorted.
    """
    goal = top_p * weights.sum(dtype=np.float64)
    rings: list[np.ndarray] = []
    high, low, mass = np.inf, _CUT_STEP, 0.0
    while True:
        ring = np.flatnonzero((weights < high) & (weights >= low))
        ring_mass = weights[ring].sum(dtype=np.float64)
        if mass + ring_mass >= goal or low == 0.0:
            break
        rings.append(ring)
        mass += ring_mass
        high, low = low, low * _CUT_STEP if low > _LIGHTEST else 0.0
    ring = ring[np.argsort(-weights[ring], kind="stable")]
    num = int(np.searchsorted(mass + np.cumsum(weights[ring], dtype=np.float64), goal)) + 1
    return np.sort(np.concatenate((*rings, ring[:num])))
