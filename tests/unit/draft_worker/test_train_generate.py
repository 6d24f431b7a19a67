"""Generated answers are the model's own, whoever they run beside, and loops are dropped."""

import numpy as np
import pytest
import torch

from draft_worker.train import generate as module
from draft_worker.train.config import GenerateConfig
from draft_worker.train.decode import choose
from draft_worker.train.generate import Answers, Generation, Job, plan_jobs
from target_worker.model.weights import load_target
from tests.support.tiny_target import make_target
from tests.support.train_rig import NO_FILTER, small_answers, small_prompts


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return folder, make_target(folder, "Llama")


def greedy(model, prompt, num):
    """By transformers, one token after the other."""
    tokens = [int(token) for token in prompt]
    for _ in range(num):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == 2:
            break
    return tokens


def test_greedy_answers_are_the_models_own_whatever_slot_they_run_in(target):
    folder, model = target
    answers = small_answers(folder, num=12, max_new=16)
    prompts = small_prompts(12)
    seen = 0
    for index in range(len(answers)):
        prompt = prompts[int(answers.groups[index])]
        assert answers[index][: answers.prompt_lens[index]].tolist() == prompt.tolist()
        if answers.temperatures[index] == 0:
            assert answers[index].tolist() == greedy(model, prompt, 16)
            seen += 1
    assert seen == 12
    assert len(answers) == 24


def test_the_same_seed_gives_the_same_answers_and_another_one_others(target):
    model, _ = load_target(target[0])

    def made(seed):
        config = GenerateConfig(slots=4, max_new=10, refill_every=2, seed=seed, **NO_FILTER)
        return Generation(model, small_prompts(6), config).run().sequences()

    assert np.array_equal(made(1).tokens, made(1).tokens)
    assert not np.array_equal(made(1).tokens, made(2).tokens)


def test_no_prompt_is_started_once_enough_tokens_are_kept(target):
    model, _ = load_target(target[0])
    config = GenerateConfig(slots=2, max_new=10, refill_every=2, max_tokens=25, **NO_FILTER)
    answers = Generation(model, small_prompts(12), config).run()
    assert 25 <= answers.num_tokens <= 45


def test_prompts_and_answers_longer_than_the_context_are_refused(target):
    model, _ = load_target(target[0])
    with pytest.raises(ValueError, match="512 positions"):
        Generation(model, small_prompts(12), GenerateConfig(slots=2, max_new=510))


def test_answers_in_a_loop_are_counted_and_dropped():
    answers = Answers(small_prompts(3), GenerateConfig(loop_ngram=4, loop_share=0.3))
    answers.add(Job(0, 0.0), np.arange(30), looped=False)
    answers.add(Job(1, 0.0), np.tile(np.arange(5), 6), looped=False)
    answers.add(Job(2, 0.0), np.arange(30), looped=True)
    assert answers.facts() == {"answers": 1, "answer_tokens": 30, "dropped_loops": 2, "made_tokens": 90}
    assert answers.sequences().groups.tolist() == [0]


def test_a_loop_ends_its_answer_early(target, monkeypatch):
    model, _ = load_target(target[0])
    monkeypatch.setattr(module, "in_loop", lambda tokens, lens, **_: lens >= 4)
    config = GenerateConfig(slots=4, max_new=24, refill_every=2, samples=0, **NO_FILTER)
    answers = Generation(model, small_prompts(6), config).run()
    assert answers.num_looped + len(answers.jobs) == 6
    assert answers.num_made <= 6 * 4


def test_every_prompt_is_answered_once_greedy_and_as_often_sampled_as_asked():
    jobs = plan_jobs(small_prompts(5), GenerateConfig(samples=2))
    counts = {(job.prompt, job.temperature): jobs.count(job) for job in jobs}
    assert counts == {(p, t): n for p in range(5) for t, n in ((0.0, 1), (0.8, 2))}


def test_sampling_follows_the_distribution_at_its_temperature():
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    drawn = choose(logits.expand(40000, -1), torch.full((40000,), 0.5))
    share = torch.bincount(drawn, minlength=4) / 40000
    assert torch.allclose(share, torch.softmax(logits[0] / 0.5, 0), atol=0.01)
    assert choose(logits, torch.zeros(1)).tolist() == [2]
