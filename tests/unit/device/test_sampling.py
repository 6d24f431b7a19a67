"""The race: pruned equals full, it samples the right distribution, and it couples draft and target."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from memsvc.device.filters import survivors
from memsvc.device.noise import exponential_noise, seed_words
from memsvc.device.row_sampler import GREEDY_BELOW, RowSampler
from memsvc.device.sampling import argmax_rows, block_maxima, choose, sample_rows
from memsvc.wire.text import Sampling


def sampler(seed: int = 1, position: int = 4, **params: Any) -> RowSampler:
    return RowSampler(Sampling(seed=seed, max_tokens=1000, **params), eos_ids=[2], prompt=[5] * position, output=[])


def full_race(logits: np.ndarray, row: RowSampler) -> int:
    """The definition: every token that may be chosen, its noise, the smallest E / p."""
    scaled = logits / np.float32(row.params.temperature)
    kept = survivors(row.params, scaled, np.array([scaled.max()]))
    noise = exponential_noise(seed_words([row.params.seed]), row.position, kept).astype(np.float64)
    with np.errstate(over="ignore"):
        times = noise * np.exp(np.float64(scaled.max()) - scaled[kept])
    return int(kept[times.argmin()])


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 40},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"top_k": 700, "top_p": 0.99, "min_p": 0.001},
]


@pytest.mark.parametrize("vocab", [7, 255, 256, 257, 5000])
@pytest.mark.parametrize("params", FILTERS)
def test_the_pruned_race_equals_the_full_race(vocab: int, params: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for spread, temperature in ((0.1, 1.0), (1.0, 2.0), (3.0, 0.7), (8.0, 1.3)):
        logits = torch.randn(12, vocab, generator=generator) * spread
        rows = [sampler(seed, 10 * seed, temperature=temperature, **params) for seed in range(12)]
        want = [full_race(logits[i].numpy(), row) for i, row in enumerate(rows)]
        assert sample_rows(logits, rows) == want


def test_a_row_s_token_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)) * 3
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 5},
        {"repetition_penalty": 1.3},
        {},
    ]
    rows = [sampler(i, 7 + i, **kind) for i, kind in enumerate(kinds)]
    together = sample_rows(logits, rows)
    assert together == [sample_rows(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = [4, 2, 0, 5, 1, 3]
    assert sample_rows(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_the_noise_belongs_to_seed_and_position() -> None:
    logits = torch.zeros(1, 2000)
    base = sample_rows(logits, [sampler(5, 9)])
    assert base == sample_rows(logits, [sampler(5, 9)])
    assert base != sample_rows(logits, [sampler(6, 9)])
    assert base != sample_rows(logits, [sampler(5, 10)])


def test_equal_times_go_to_the_lowest_id_and_temperature_zero_is_argmax() -> None:
    logits = torch.zeros(2, 600)
    logits[0, [7, 300, 599]] = 4.0
    logits[1, 123] = 1e-6
    assert sample_rows(logits, [sampler(temperature=0.0), sampler(temperature=1e-6)]) == [7, 123]


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 40}, {"top_p": 0.9}, {"top_p": 1e-9}, {"top_p": 1 - 1e-9}, {"min_p": 0.1}]
)
@pytest.mark.parametrize("temperature", [2.0, GREEDY_BELOW, 1e-6, 1e-30, 1e-44, 1e-60])
def test_the_ends_of_temperature_and_top_p_are_exact_in_float32(temperature: float, params: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    for spread in (1e-3, 3.0, 1e4):
        logits = torch.randn(16, 3000, generator=generator) * spread
        rows = [sampler(seed, 3 + seed, temperature=temperature, **params) for seed in range(16)]
        if temperature < GREEDY_BELOW:
            want = logits.argmax(-1).tolist()
        else:
            want = [full_race(logits[i].numpy(), row) for i, row in enumerate(rows)]
        assert sample_rows(logits, rows) == want
        values, ids = logits.topk(16)
        if temperature < 1:
            picks = choose(values.numpy(), ids.numpy(), rows)
            assert ids.numpy()[np.arange(16), picks].tolist() == want


def test_a_temperature_of_two_flattens_and_a_tiny_one_never_leaves_the_largest() -> None:
    logits = torch.tensor([[0.0, 2.0 * np.log(3.0)]]).expand(4000, 2)
    counts = {
        t: sum(sample_rows(logits, [sampler(7, 1 + i, temperature=t) for i in range(4000)])) / 4000
        for t in (2.0, 1.0, 1e-6)
    }
    assert abs(counts[2.0] - 3 / 4) < 0.03
    assert abs(counts[1.0] - 9 / 10) < 0.03
    assert counts[1e-6] == 1.0


@pytest.mark.parametrize("spread", [1e-6, 0.5, 4.0, 60.0])
@pytest.mark.parametrize("top_p", [1e-30, 1e-9, 0.5, 1 - 1e-7, 1 - 1e-9, 1 - 2.0**-53])
def test_top_p_keeps_the_fewest_largest_at_both_ends(top_p: float, spread: float) -> None:
    scaled = (np.random.default_rng(11).standard_normal(4000) * spread).astype(np.float32)
    scaled[17] = scaled[3000] = scaled.max() + np.float32(1e-3)
    kept = survivors(Sampling(seed=0, max_tokens=1, top_p=top_p), scaled, np.array([scaled.max()]))
    weights = np.exp(scaled - scaled.max())
    # By weight: logits that differ may weigh the same in float32, and then the lower id goes first.
    order = np.argsort(-weights, kind="stable")
    weights = weights[order].astype(np.float64)
    total = math.fsum(weights)
    # Shares as exact as they get: the running sums may differ from these by some rounding of the whole.
    missing = total - math.fsum(weights[: len(kept)])
    assert kept.tolist() == sorted(order[: len(kept)].tolist())
    assert missing <= (1 - top_p) * total + 1e-12 * total
    assert missing + weights[len(kept) - 1] >= (1 - top_p) * total - 1e-12 * total
    if top_p <= 1e-9:
        assert kept.tolist() == [17]


@pytest.mark.parametrize("params", [{"temperature": 0.8}, {"temperature": 1.2, "top_k": 6}, {"top_p": 0.8}])
def test_the_race_samples_the_softmax(params: dict[str, Any]) -> None:
    num, vocab = 4000, 300
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(4)) * 2
    rows = [sampler(seed=77, position=1 + i, **params) for i in range(num)]
    counts = np.bincount(sample_rows(logits.expand(num, vocab), rows), minlength=vocab)
    scaled = logits.numpy() / np.float32(params.get("temperature", 1.0))
    kept = survivors(rows[0].params, scaled, np.array([scaled.max()]))
    p = np.zeros(vocab)
    p[kept] = np.exp(scaled[kept] - scaled.max())
    p /= p.sum()
    assert counts[p == 0].sum() == 0
    big = p * num >= 5
    observed = np.append(counts[big], counts[~big].sum())
    expected = np.append(p[big] * num, p[~big].sum() * num)
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    assert ((observed - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


def test_shared_noise_makes_draft_and_target_agree_more_often_than_separate_draws() -> None:
    num, vocab, k = 2000, 600, 16
    generator = torch.Generator().manual_seed(8)
    target = torch.randn(num, vocab, generator=generator) * 2.5
    draft = target + torch.randn(num, vocab, generator=generator) * 0.7
    values, ids = draft.topk(k)
    rows = [sampler(3, 1 + i, temperature=0.9) for i in range(num)]
    wanted = np.array(sample_rows(target, rows))

    def drafted(seed: int) -> np.ndarray:
        picks = choose(values.numpy(), ids.numpy(), [sampler(seed, 1 + i, temperature=0.9) for i in range(num)])
        return ids.numpy()[np.arange(num), picks]

    coupled, uncoupled = (drafted(3) == wanted).mean(), (drafted(4) == wanted).mean()
    p = (target / 0.9).softmax(-1)
    q = torch.zeros_like(p).scatter(1, ids, (values / 0.9).softmax(-1))
    optimal = torch.minimum(p, q).sum(-1).mean().item()
    assert coupled > uncoupled + 0.15
    assert coupled <= optimal + 0.03
    assert coupled > optimal - 0.1


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.2}]
)
def test_choose_agrees_with_the_target_when_the_candidates_hold_all_that_may_be_chosen(params: dict[str, Any]) -> None:
    logits = torch.full((40, 2000), -torch.inf)
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(2000, generator=generator)[:16] for _ in range(40)])
    scores = torch.randn(40, 16, generator=generator) * 2
    logits.scatter_(1, ids, scores)
    rows = [sampler(9, 1 + i, **params) for i in range(40)]
    picks = choose(scores.numpy(), ids.numpy(), rows)
    assert ids.numpy()[np.arange(40), picks].tolist() == sample_rows(logits, rows)


def test_choose_takes_noise_drawn_beforehand() -> None:
    scores, ids = np.zeros((1, 4), np.float32), np.array([[900, 3, 70, 8]])
    row = sampler(1, 6)
    noise = exponential_noise(seed_words([1]), 6, ids)
    assert choose(scores, ids, [row], noise)[0] == noise[0].argmin() == choose(scores, ids, [row])[0]
    assert choose(scores, ids, [row], np.array([[3, 3, 1, 2]], np.float32))[0] == 2


def test_choose_breaks_ties_by_the_lowest_id() -> None:
    scores = np.array([[1.0, 2.0, 2.0, 0.0]], np.float32)
    assert choose(scores, np.array([[9, 8, 4, 1]]), [sampler(temperature=0.0)]).tolist() == [2]


def test_choose_gives_a_candidate_even_if_none_may_be_chosen() -> None:
    row = sampler(min_tokens=5, stop_token_ids=[3, 4])
    ids = np.array([[4, 3]])
    for temperature in (0.0, 1.0):
        row = sampler(min_tokens=5, stop_token_ids=[3, 4], temperature=temperature)
        assert choose(np.ones((1, 2), np.float32), ids, [row])[0] in (0, 1)


def test_rows_and_samplers_must_match() -> None:
    with pytest.raises(ValueError, match="1 rows of logits for 2 samplers"):
        sample_rows(torch.zeros(1, 10), [sampler(), sampler()])


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"repetition_penalty": 1.2}])
def test_bfloat16_logits_count_as_their_float32_values(params: dict[str, Any]) -> None:
    logits = (torch.randn(30, 3000, generator=torch.Generator().manual_seed(6)) * 3).bfloat16()
    rows = [sampler(i, **params) for i in range(30)]
    assert sample_rows(logits, rows) == sample_rows(logits.float(), rows)


@pytest.mark.parametrize("vocab", [3, 256, 300, 1023])
def test_argmax_rows_takes_the_lowest_id_of_the_largest(vocab: int) -> None:
    for seed in range(20):
        logits = torch.randint(0, 4, (40, vocab), generator=torch.Generator().manual_seed(seed)).float()
        assert argmax_rows(logits) == logits.numpy().argmax(1).tolist()
    assert argmax_rows(torch.zeros(0, vocab)) == []


def test_block_maxima_cover_a_short_last_block() -> None:
    logits = torch.arange(600.0)[None]
    assert block_maxima(logits).tolist() == [[255.0, 511.0, 599.0]]
    assert block_maxima(logits[:, :10]).tolist() == [[9.0]]
    assert block_maxima(logits[:, :512]).tolist() == [[255.0, 511.0]]


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(3, 500)
    before = logits.clone()
    rows = [sampler(repetition_penalty=2.0), sampler(min_tokens=3), sampler(top_p=0.5)]
    sample_rows(logits, rows)
    assert torch.equal(logits, before)
