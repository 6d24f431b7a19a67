"""Which candidates become drafts: the selector's walk, and the noise shared with the target."""

import numpy as np
import pytest
import torch

from draft_worker.choice import CoupledChoice, first_best, is_plain_argmax, walk
from draft_worker.propose import Proposer
from draft_worker.selector import CandidateSelector
from memsvc.device.noise import exponential_noise, seed_words
from memsvc.device.row_sampler import RowSampler
from memsvc.device.sampling import sample_rows
from memsvc.wire.text import Sampling
from tests.support.draft_rig import GREEDY, DraftRig
from tests.support.make_drafter import V1, V2


def sampler(sampling: Sampling, prompt: list[int], output: list[int]) -> RowSampler:
    return RowSampler(sampling, eos_ids=[2], prompt=prompt, output=output)


def test_the_lattice_and_the_walk_follow_the_definition():
    generator = torch.Generator().manual_seed(3)
    n, k, top, rank, width, vocab = 3, 4, 5, 6, 7, 50
    hidden, before, after = (
        torch.randn(size, generator=generator) for size in ((rank, width), (vocab, rank), (vocab, rank))
    )
    z, unary = torch.randn(n, k, width, generator=generator), torch.randn(n, k, top, generator=generator)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[: k * top].view(k, top) for _ in range(n)])
    anchors = torch.tensor([4, 9, 9])
    lattice = CandidateSelector(hidden, before, after).lattice(z, anchors, unary, ids)
    tokens = walk(lattice.numpy(), ids.numpy(), first_best)
    for req in range(n):
        previous = int(anchors[req])
        for row in range(k):
            r = hidden @ z[req, row]
            scores = [
                float(unary[req, row, c] + (before[previous] * r * after[ids[req, row, c]]).sum()) for c in range(top)
            ]
            previous = int(ids[req, row, int(np.argmax(scores))])
            assert tokens[req, row] == previous


def test_equal_scores_go_to_the_first_candidate():
    ids = np.array([[[7, 3, 5]]])
    assert walk(np.zeros((1, 1, 1, 3), np.float32), ids, first_best).tolist() == [[7]]


def test_only_greedy_requests_that_ignore_their_tokens_are_plain():
    plain = Sampling(seed=1, max_tokens=9, temperature=0.0)
    assert is_plain_argmax(sampler(plain, [1], [5]))
    for other in (
        Sampling(seed=1, max_tokens=9, temperature=0.5),
        Sampling(seed=1, max_tokens=9, temperature=0.0, repetition_penalty=1.5),
        Sampling(seed=1, max_tokens=9, temperature=0.0, min_tokens=3),
    ):
        assert not is_plain_argmax(sampler(other, [1], [5]))


def test_row_j_draws_with_the_noise_of_the_position_it_predicts():
    sampling = Sampling(seed=77, max_tokens=9, temperature=1.0)
    scores = np.zeros((1, 3, 1, 4), np.float32)
    ids = np.array([[[10, 20, 30, 40]] * 3])
    tokens = walk(scores, ids, CoupledChoice([sampler(sampling, [1, 2, 3, 4], [5])], ids))
    # The anchor stands at 4, so rows 1, 2 and 3 predict positions 5, 6 and 7; equal scores leave it to the noise.
    low, high = seed_words([77])
    for row, position in enumerate((5, 6, 7)):
        noise = exponential_noise((low, high), np.uint64(position), ids[0, row])
        assert tokens[0, row] == ids[0, row, noise.argmin()]


SHAPED = {
    "temperature": Sampling(seed=5, max_tokens=9, temperature=0.7),
    "top_k": Sampling(seed=6, max_tokens=9, temperature=1.3, top_k=4),
    "top_p": Sampling(seed=7, max_tokens=9, temperature=1.0, top_p=0.8),
    "min_p": Sampling(seed=8, max_tokens=9, temperature=1.0, min_p=0.2),
    "penalties": Sampling(
        seed=9, max_tokens=9, temperature=0.8, repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=0.4
    ),
    "greedy with penalty": Sampling(seed=10, max_tokens=9, temperature=0.0, frequency_penalty=3.0),
    "min_tokens": Sampling(seed=11, max_tokens=9, temperature=0.0, min_tokens=8, stop_token_ids=[30, 31, 32]),
}


@pytest.mark.parametrize("name", SHAPED)
def test_a_draft_whose_logits_are_the_targets_is_what_the_target_draws(name):
    """With every token a candidate and the target's own logits, draft and target are the same choice, row by row."""
    vocab, k = 40, 6
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(k, vocab, generator=generator)
    prompt, output = [3, 4, 5, 6], [7, 8, 7]
    ids = np.broadcast_to(np.arange(vocab), (1, k, vocab))
    drafts = walk(logits.numpy()[None, :, None], ids, CoupledChoice([sampler(SHAPED[name], prompt, output)], ids))[
        0
    ].tolist()
    target = sampler(SHAPED[name], prompt, output)
    expected = []
    for row in range(k):
        expected += sample_rows(logits[row : row + 1], [target])
        target.push(expected[-1])
    assert drafts == expected


def test_a_walk_leaves_the_samplers_as_they_were():
    state = sampler(SHAPED["penalties"], [1, 2], [3])
    ids = np.array([[[4, 5], [4, 5]]])
    walk(np.zeros((1, 2, 1, 2), np.float32), ids, CoupledChoice([state], ids))
    assert (state.num_tokens, state.n_out, state.last) == (3, 1, 3)
    assert state.penalised_ids().tolist() == sampler(SHAPED["penalties"], [1, 2], [3]).penalised_ids().tolist()


@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize("name", ["top_p", "penalties"])
def test_sampled_drafts_of_the_whole_model_equal_the_oracles(version, name, tmp_path):
    """The oracle ranks its 16 candidates with the noise and the formulas written out here."""
    rig = DraftRig(tmp_path, version)
    rig.open(0, 21)
    rig.open(1, 6)
    sampling = SHAPED[name]
    got = rig.propose([0, 1], 7, sampling=sampling)
    for rid in (0, 1):
        tokens = rig.tokens[rid]
        before: list[int] = []

        def pick(row: int, scores: list[float], ids: list[int], before=before, tokens=tokens) -> int:
            values = np.array(
                [_penalised(s, i, sampling, tokens[:3], tokens[3:] + before) for s, i in zip(scores, ids, strict=True)]
            )
            weights = np.exp((values - values.max()) / sampling.temperature)
            weights = _nucleus(weights / weights.sum(), sampling.top_p)
            low, high = seed_words([sampling.seed])
            noise = exponential_noise((low, high), np.uint64(len(tokens) - 1 + row), np.array(ids))
            with np.errstate(divide="ignore"):
                chosen = int((noise / weights).argmin())
            before.append(ids[chosen])
            return chosen

        assert got[rid] == rig.expected(rid, 7, pick)


def _penalised(score: float, token: int, sampling: Sampling, prompt: list[int], output: list[int]) -> float:
    if token in prompt + output:
        score = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
    count = output.count(token)
    return score - count * sampling.frequency_penalty - (count > 0) * sampling.presence_penalty


def _nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-probabilities, kind="stable")
    kept = np.cumsum(probabilities[order]) - probabilities[order] < top_p
    out = np.zeros_like(probabilities)
    out[order[kept]] = probabilities[order[kept]]
    return out


def test_sharing_the_targets_noise_makes_more_drafts_right_than_noise_of_its_own():
    """Draft and target distributions differ; the same seed must still agree more often than independent draws."""
    generator = torch.Generator().manual_seed(2)
    num, top = 400, 16
    target_logits = 1.5 * torch.randn(num, top, generator=generator)
    draft_logits = target_logits + 0.5 * torch.randn(num, top, generator=generator)
    ids = np.broadcast_to(np.arange(top), (num, 1, top))

    def draw(logits: torch.Tensor, first_seed: int) -> np.ndarray:
        samplers = [sampler(Sampling(seed=first_seed + index, max_tokens=9), [1], [2]) for index in range(num)]
        return walk(logits.numpy()[:, None, None], ids, CoupledChoice(samplers, ids))[:, 0]

    target = draw(target_logits, 0)
    coupled = (draw(draft_logits, 0) == target).mean()
    independent = (draw(draft_logits, 10_000) == target).mean()
    assert coupled > independent + 0.2, (coupled, independent)


def test_greedy_and_sampled_requests_share_a_batch(tmp_path):
    rig = DraftRig(tmp_path, V1)
    rig.open(0, 9)
    rig.open(1, 14)
    proposer = Proposer(rig.model, rig.pool, rig.tables, "paged")
    samplers = [rig.sampler(0, GREEDY), rig.sampler(1, SHAPED["temperature"])]
    mixed = proposer.propose(rig.batch([0, 1], 7), samplers).token_ids.tolist()
    assert mixed == [rig.propose([0], 7)[0], rig.propose([1], 7, sampling=SHAPED["temperature"])[0]]
