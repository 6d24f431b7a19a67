"""The accept rule against a plain loop over one request at a time."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memsvc.device.row_sampler import RowSampler
from memsvc.device.sampling import sample_rows
from memsvc.wire.base import FinishReason
from memsvc.wire.text import Sampling
from target_worker.verify import VerifyRow, simulate_accepts, verify_blocks

VOCAB = 24


def sampler(seed: int = 1, output: int = 0, **params: Any) -> RowSampler:
    sampling = Sampling(**{"seed": seed, "max_tokens": 100} | params)
    return RowSampler(sampling, eos_ids=[2], prompt=[5, 6], output=[9] * output)


def plain_rule(logits: torch.Tensor, row: VerifyRow) -> list[int]:
    """One request: sample, compare, go on or stop."""
    state, emitted = row.sampler.fork(), []
    for j in range(len(row.drafts) + 1):
        token = sample_rows(logits[j : j + 1], [state])[0]
        emitted.append(token)
        state.push(token)
        if token in state.stop_ids or state.n_out == state.params.max_tokens:
            break
        if j == len(row.drafts) or row.drafts[j] != token:
            break
    return emitted


params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0]),
        "top_k": st.sampled_from([1, 3]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "repetition_penalty": st.sampled_from([1.0, 1.8]),
        "frequency_penalty": st.sampled_from([0.0, 1.5]),
        "min_tokens": st.integers(0, 6),
        "max_tokens": st.integers(3, 9),
        "stop_token_ids": st.lists(st.integers(10, VOCAB), max_size=2),
        "ignore_eos": st.booleans(),
    },
)


@given(
    seed=st.integers(0, 2**32),
    requests=st.lists(st.tuples(params, st.integers(0, 5), st.integers(0, 2), st.booleans()), min_size=1, max_size=6),
)
def test_a_batch_emits_what_each_request_would_alone(seed: int, requests: list[tuple]) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, parts, want = [], [], []
    for i, (kind, num_drafts, output, knows) in enumerate(requests):
        logits = torch.randn(num_drafts + 1, VOCAB, generator=generator) * 3
        state = sampler(seed + i, output, **kind)
        drafts = torch.randint(0, VOCAB, (num_drafts,), generator=generator).tolist()
        if knows:  # a draft that knows most of the answer
            ahead = state.fork()
            for j in range(num_drafts):
                drafts[j] = sample_rows(logits[j : j + 1], [ahead])[0] if j != 3 else drafts[j]
                ahead.push(drafts[j])
        row = VerifyRow(state, drafts)
        want.append(plain_rule(logits, row))
        rows.append(row)
        parts.append(logits)
    before = [row.sampler.n_out for row in rows]
    got = verify_blocks(torch.cat(parts), rows)
    assert got == want
    assert [row.sampler.n_out for row in rows] == [n + len(tokens) for n, tokens in zip(before, want, strict=True)]
    assert [row.sampler.last for row in rows] == [tokens[-1] for tokens in want]


def rows_for(tokens: list[int]) -> torch.Tensor:
    """Logits whose argmax are these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float() * 9


def test_all_drafts_right_gives_all_of_them_and_the_bonus() -> None:
    assert verify_blocks(rows_for([7, 8, 9, 10]), [VerifyRow(sampler(temperature=0.0), [7, 8, 9])]) == [[7, 8, 9, 10]]


def test_the_first_wrong_draft_is_replaced_and_ends_the_block() -> None:
    assert verify_blocks(rows_for([7, 8, 9, 10]), [VerifyRow(sampler(temperature=0.0), [7, 3, 9])]) == [[7, 8]]


def test_a_stop_token_is_the_last_one_even_if_more_drafts_are_right() -> None:
    row = VerifyRow(sampler(temperature=0.0), [7, 2, 9])
    assert verify_blocks(rows_for([7, 2, 9, 10]), [row]) == [[7, 2]]
    assert row.sampler.finish is FinishReason.STOP


def test_max_tokens_cuts_the_block() -> None:
    row = VerifyRow(sampler(output=3, temperature=0.0, max_tokens=5), [7, 8, 9])
    assert verify_blocks(rows_for([7, 8, 9, 10]), [row]) == [[7, 8]]
    assert row.sampler.finish is FinishReason.LENGTH


def test_penalties_are_those_of_each_row() -> None:
    # The second 7 is penalised because the first one was emitted in this very block.
    logits = rows_for([7, 7, 7])
    logits[:, 8] = 8.5
    row = VerifyRow(sampler(temperature=0.0, presence_penalty=1.0), [7, 8])
    assert verify_blocks(logits, [row]) == [[7, 8, 7]]


def test_the_text_does_not_depend_on_how_many_drafts_are_checked_at_once() -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    kind = {"temperature": 0.9, "repetition_penalty": 1.2, "min_tokens": 8, "ignore_eos": True}
    alone = sampler(3, **kind)
    text = [verify_blocks(logits[i : i + 1], [VerifyRow(alone, [])])[0][0] for i in range(40)]
    for k in (1, 4, 7):
        state, done = sampler(3, **kind), []
        while len(done) < 30:
            at = len(done)
            drafts = text[at : at + k]
            if at % 2:
                drafts = [*drafts[:-1], (drafts[-1] + 1) % VOCAB]
            done += verify_blocks(logits[at : at + k + 1], [VerifyRow(state, drafts)])[0]
        assert done == text[: len(done)]


def test_logits_must_cover_the_blocks() -> None:
    with pytest.raises(ValueError, match="3 rows of logits for 2 blocks of 4 rows"):
        verify_blocks(torch.zeros(3, VOCAB), [VerifyRow(sampler(), [1]), VerifyRow(sampler(), [1])])


def test_no_blocks_emit_nothing() -> None:
    assert verify_blocks(torch.zeros(0, VOCAB), []) == []


@pytest.mark.parametrize("length", [1.0, 1.3, 2.5, 4.0, 8.0])
def test_simulated_blocks_emit_the_asked_length_in_the_mean(length: float) -> None:
    rows = [VerifyRow(sampler(seed, ignore_eos=True), [1] * 7) for seed in range(1500)]
    accepts = simulate_accepts(length, rows)
    assert accepts == simulate_accepts(length, rows)
    assert set(accepts) <= {int(length) - 1, int(length)}
    assert abs(sum(accepts) / len(accepts) + 1 - length) < 0.05
    emitted = verify_blocks(torch.randn(8, VOCAB), rows[:1], simulate=length)
    assert len(emitted[0]) == accepts[0] + 1
    assert emitted[0][:-1] == [1] * accepts[0]


def test_simulation_accepts_no_more_than_was_drafted_and_needs_a_bonus() -> None:
    assert simulate_accepts(8.0, [VerifyRow(sampler(), [1, 2])]) == [2]
    # A plain step has no drafts to accept.
    assert simulate_accepts(8.0, [VerifyRow(sampler(), [])]) == [0]
    assert [len(tokens) for tokens in verify_blocks(torch.randn(1, VOCAB), [VerifyRow(sampler(), [])], 3.0)] == [1]
    with pytest.raises(ValueError, match=r"0\.5 is below 1"):
        simulate_accepts(0.5, [VerifyRow(sampler(), [1])])
