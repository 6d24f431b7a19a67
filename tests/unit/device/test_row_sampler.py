"""Penalties and min_tokens against transformers' processors, and how a sampler moves."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from memsvc.device.row_sampler import RowSampler
from memsvc.device.sampling import adjusted
from memsvc.wire.base import FinishReason
from memsvc.wire.text import Sampling

PROMPT, OUTPUT = [4, 9, 9, 30], [9, 11, 11, 11, 40]


def sampler(prompt: list[int] = PROMPT, output: list[int] = OUTPUT, **params: Any) -> RowSampler:
    return RowSampler(Sampling(**{"seed": 1, "max_tokens": 50} | params), eos_ids=[2, 7], prompt=prompt, output=output)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 64, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_equals_transformers_over_prompt_and_answer(penalty: float) -> None:
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + OUTPUT]), logits())
    assert torch.equal(adjusted(logits(), [sampler(repetition_penalty=penalty)]), want)


def test_presence_and_frequency_count_the_answer_only() -> None:
    want = logits()
    for token, count in {9: 1, 11: 3, 40: 1}.items():
        want[0, token] = want[0, token] - np.float32(0.25) * count - np.float32(0.5)
    got = adjusted(logits(), [sampler(presence_penalty=0.5, frequency_penalty=0.25)])
    assert torch.equal(got, want)


def test_min_tokens_equals_transformers_until_it_is_reached() -> None:
    row = sampler(output=[9, 9], min_tokens=4)
    process = MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [2, 7])
    tokens = [*PROMPT, 9, 9]
    for _ in range(4):
        want = process(torch.tensor([tokens]), logits())
        assert torch.equal(adjusted(logits(), [row]), want)
        assert row.withholds == (len(tokens) - len(PROMPT) < 4)
        tokens.append(12)
        row.push(12)


def test_min_tokens_withholds_the_request_s_stop_tokens_and_those_past_the_vocabulary() -> None:
    got = adjusted(logits(), [sampler(output=[], min_tokens=1, stop_token_ids=[13, 999], ignore_eos=True)])
    assert got[0].isinf().nonzero()[:, 0].tolist() == [2, 7, 13]


def test_a_sampler_that_was_pushed_equals_one_made_from_the_tokens() -> None:
    params = {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.2, "min_tokens": 4}
    moved = sampler(output=[], **params)
    for i, token in enumerate(OUTPUT):
        fresh = sampler(output=OUTPUT[:i], **params)
        assert torch.equal(adjusted(logits(i), [moved]), adjusted(logits(i), [fresh]))
        assert (moved.position, moved.n_out, moved.last) == (fresh.position, fresh.n_out, fresh.last)
        moved.push(token)
    assert moved.position == len(PROMPT + OUTPUT)


def test_a_fork_moves_alone() -> None:
    row = sampler(frequency_penalty=1.0)
    before = adjusted(logits(), [row])
    fork = row.fork()
    fork.push(17)
    assert torch.equal(adjusted(logits(), [row]), before)
    assert adjusted(logits(), [fork])[0, 17] == before[0, 17] - 1
    assert (fork.position, row.position) == (10, 9)


def test_adjust_over_candidates_equals_the_full_row() -> None:
    row = sampler(output=[9, 11], repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.1, min_tokens=9)
    ids = np.array([40, 9, 2, 4, 11, 63])
    want = adjusted(logits(), [row])[0, ids].numpy()
    assert np.array_equal(row.adjust(ids, logits()[0, ids].numpy()), want)


def test_counts_are_kept_only_for_a_penalty() -> None:
    assert not sampler(min_tokens=2, top_p=0.5).has_penalty
    assert len(sampler().penalised_ids()) == 0
    assert sorted(sampler(presence_penalty=0.1).penalised_ids().tolist()) == [9, 11, 40]
    assert sorted(sampler(repetition_penalty=1.1).penalised_ids().tolist()) == [4, 9, 11, 30, 40]


def test_a_request_ends_at_a_stop_token_or_at_max_tokens() -> None:
    assert sampler(output=[]).finish is FinishReason.RUNNING
    assert sampler(prompt=[2], output=[]).finish is FinishReason.RUNNING
    assert sampler(output=[5, 7]).finish is FinishReason.STOP
    assert sampler(output=[5, 7], ignore_eos=True).finish is FinishReason.RUNNING
    assert sampler(output=[5, 13], ignore_eos=True, stop_token_ids=[13]).finish is FinishReason.STOP
    assert sampler(output=[5, 6], max_tokens=2).finish is FinishReason.LENGTH
    assert sampler(output=[5, 7], max_tokens=2).finish is FinishReason.STOP
