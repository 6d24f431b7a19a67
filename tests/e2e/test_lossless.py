"""SmolLM2 in fp32: the served text is transformers' text, whatever drafts and at any concurrency."""

import json
from pathlib import Path

import pytest

from tests.support.perfect_draft import OPTIONS
from tests.support.reference import PROMPTS, Reference
from tests.support.served import Answer, Served, chat, write_continuations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FP32 = ["--dtype", "float32", "--mem-bytes", "600M"]


def check_greedy(server: Served, references: list[Reference], concurrency: int) -> list[Answer]:
    """Every answer equals transformers', in text and in number of tokens."""
    answers = server.chat_all([chat(reference.prompt) for reference in references], concurrency)
    for answer, reference in zip(answers, references, strict=True):
        assert answer.text == reference.text
        assert answer.usage["completion_tokens"] == len(reference.answer_ids)
        assert answer.usage["prompt_tokens"] == len(reference.prompt_ids)
    return answers


def sampled(server: Served, concurrency: int, num: int = 12) -> list[str]:
    """Texts at temperature 0.8, seeds and filters of all sorts."""
    options = [{}, {"top_p": 0.9}, {"top_k": 20}, {"frequency_penalty": 0.5, "repetition_penalty": 1.1}]
    bodies = [
        chat(PROMPTS[index], temperature=0.8, seed=1000 + index, max_tokens=40, **options[index % len(options)])
        for index in range(num)
    ]
    return [answer.text for answer in server.chat_all(bodies, concurrency)]


@pytest.fixture(scope="module")
def plain_samples() -> dict[int, list[str]]:
    """Texts without speculation, for the test with speculation to compare with."""
    return {}


def test_plain_decoding_gives_the_text_of_transformers(
    references: list[Reference], plain_samples: dict[int, list[str]]
) -> None:
    with Served([*FP32, "--speculative-algorithm", "none"]) as server:
        check_greedy(server, references, 1)
        check_greedy(server, references, 32)
        plain_samples[32] = sampled(server, 32)
        assert sampled(server, 1, 4) == plain_samples[32][:4]
    assert len(set(plain_samples[32])) == len(plain_samples[32])


def test_its_drafter_changes_no_text_and_is_accepted(
    references: list[Reference], plain_samples: dict[int, list[str]]
) -> None:
    with Served([*FP32, "--spec-tokens", "7"]) as server:
        check_greedy(server, references[:3], 1)
        answers = check_greedy(server, references, 32)
        assert all(answer.speculative["num_draft_tokens"] > 0 for answer in answers)
        assert sampled(server, 32) == plain_samples[32]
        accepted = sum(answer.speculative["num_accepted_draft_tokens"] for answer in answers)
        assert accepted > 0.8 * sum(answer.speculative["num_spec_steps"] for answer in answers)


def test_a_random_drafter_changes_no_text(references: list[Reference], random_drafter: Path) -> None:
    with Served([*FP32, "--speculative-draft-model-path", str(random_drafter), "--spec-tokens", "7"]) as server:
        check_greedy(server, references[:3], 1)
        answers = check_greedy(server, references, 32)
        assert all(answer.speculative["num_draft_tokens"] > 0 for answer in answers)


def test_widths_chosen_step_by_step_change_no_text(
    references: list[Reference], plain_samples: dict[int, list[str]], tmp_path: Path
) -> None:
    continuations = tmp_path / "continuations.json"
    write_continuations(continuations, [reference.sequence for reference in references])
    env = {OPTIONS: json.dumps({"continuations": str(continuations), "p_wrong": 0.4})}
    with Served(FP32, module="tests.support.launch_perfect", env=env) as server:
        check_greedy(server, references[:3], 1)
        check_greedy(server, references, 32)
        # Of these the drafter knows nothing, so widths go down to nothing.
        assert sampled(server, 32) == plain_samples[32]
        steps = {s.labels["drafts"]: s.value for s in server.metrics() if s.name == "memsvc_spec_width_steps_total"}
    assert len([num for num in steps.values() if num]) >= 3, steps


def test_a_perfect_drafter_changes_no_text_and_is_accepted(
    references: list[Reference], random_drafter: Path, tmp_path: Path
) -> None:
    continuations = tmp_path / "continuations.json"
    write_continuations(continuations, [reference.sequence for reference in references])
    flags = [*FP32, "--speculative-draft-model-path", str(random_drafter), "--spec-tokens", "7"]
    env = {OPTIONS: json.dumps({"continuations": str(continuations)})}
    with Served(flags, module="tests.support.launch_perfect", env=env) as server:
        for concurrency in (1, 32):
            answers = check_greedy(server, references, concurrency)
            accept = [a.speculative["mean_acceptance_length"] for a in answers if a.usage["completion_tokens"] == 64]
            assert min(accept) > 6.5
