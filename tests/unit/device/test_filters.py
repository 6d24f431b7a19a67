"""top_k, top_p and min_p against transformers' warpers and against their definition."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from memsvc.device.filters import survivors
from memsvc.wire.text import Sampling


def kept_by(logits: np.ndarray, **params: Any) -> list[int]:
    scaled = logits / np.float32(params.get("temperature", 1.0))
    size = -(-len(scaled) // 7)
    maxima = np.array([part.max() for part in np.array_split(scaled, size)])
    return survivors(Sampling(seed=0, max_tokens=1, **params), scaled, maxima).tolist()


def kept_by_transformers(logits: np.ndarray, **params: Any) -> list[int]:
    scores = torch.from_numpy(logits)[None]
    warpers: list[Any] = [TemperatureLogitsWarper(params.get("temperature", 1.0))]
    if params.get("top_k"):
        warpers.append(TopKLogitsWarper(params["top_k"]))
    if params.get("top_p", 1.0) < 1.0:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if params.get("min_p"):
        warpers.append(MinPLogitsWarper(params["min_p"]))
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.int64), scores)
    return scores[0].isfinite().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 900},
        {"top_k": 5000},
        {"top_p": 0.001},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.9999},
        {"min_p": 0.1},
        {"temperature": 0.6, "top_k": 100, "top_p": 0.8},
        {"temperature": 1.4, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 2.0, "top_k": 600, "top_p": 0.97, "min_p": 0.01},
    ],
)
def test_the_tokens_that_stay_are_those_transformers_keeps(params: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    for spread in (0.01, 1.0, 3.0, 12.0):
        logits = (rng.standard_normal(3001) * spread).astype(np.float32)
        assert kept_by(logits, **params) == kept_by_transformers(logits, **params)


def test_top_k_keeps_the_ties_of_the_last_one() -> None:
    assert kept_by(np.array([1, 5, 3, 3, 0, 3], np.float32), top_k=2) == [1, 2, 3, 5]


def test_top_p_takes_the_lower_id_of_equals_and_always_one() -> None:
    even = np.zeros(8, np.float32)
    assert kept_by(even, top_p=0.5) == [0, 1, 2, 3]
    assert kept_by(even, top_p=0.51) == [0, 1, 2, 3, 4]
    assert kept_by(even, top_p=0.0) == [0]


def test_top_p_counts_over_what_top_k_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert kept_by(logits, top_p=0.75) == [0, 1, 2]
    assert kept_by(logits, top_k=2, top_p=0.56) == [0]
    assert kept_by(logits, top_k=2, top_p=0.75) == [0, 1]


def test_tokens_ruled_out_before_never_come_back() -> None:
    logits = np.full(500, -np.inf, np.float32)
    logits[[3, 400]] = [0.0, -60.0]
    for params in ({"top_k": 2}, {"top_p": 0.9999999}, {"min_p": 1e-30}):
        assert set(kept_by(logits, **params)) <= {3, 400}


@pytest.mark.parametrize(
    "params", [{"min_p": 0.5}, {"top_p": 0.5}, {"top_k": 2}, {"top_k": 2, "top_p": 0.5, "min_p": 0.5}]
)
@pytest.mark.parametrize("values", [[np.nan] * 4, [np.inf, np.inf, 1.0, np.nan], [-np.inf] * 4])
def test_something_stays_even_of_logits_that_are_no_numbers(params: dict[str, Any], values: list[float]) -> None:
    scaled = np.array(values, dtype=np.float32)
    with np.errstate(all="ignore"):
        kept = survivors(Sampling(seed=0, max_tokens=1, **params), scaled, scaled)
    assert len(kept) >= 1
    assert 0 <= kept[0] < 4
