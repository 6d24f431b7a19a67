"""The whole stack on a tiny hybrid target: its text is transformers' text, whatever happens to its states."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.perfect_draft import OPTIONS
from tests.support.reference import Reference, greedy_answers
from tests.support.served import Answer, Served, chat, write_continuations
from tests.support.tiny_hybrid import make_hybrid
from tests.support.tiny_server import CONTEXT, VOCAB, prompt, write_tiny_drafter
from tests.support.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.slow

NUM_REQUESTS = 32
MAX_TOKENS = 40
FLAGS = ["--dtype", "float32", "--page-size", "4", "--threads", "1"]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three linear layers and a full one, random weights."""
    folder = tmp_path_factory.mktemp("hybrid") / "hybrid"
    folder.mkdir()
    make_hybrid(folder, vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    write_tiny_tokenizer(folder, VOCAB, CONTEXT)
    return folder


@pytest.fixture(scope="module")
def drafter(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter for it, B = 4."""
    return write_tiny_drafter(tmp_path_factory.mktemp("drafter") / "drafter", hybrid)


@pytest.fixture(scope="module")
def references(hybrid: Path) -> list[Reference]:
    """Prompts of unlike lengths, each twice, some the beginning of others, and their greedy answers."""
    return 2 * greedy_answers(hybrid, [prompt(i % 5, 6 + i) for i in range(NUM_REQUESTS // 2)], MAX_TOKENS, 1)


@pytest.fixture(scope="module")
def server(hybrid: Path, drafter: Path) -> Iterator[Served]:
    """A speculative server with room for everything."""
    flags = [*FLAGS, "--model-path", str(hybrid), "--mem-bytes", "64M"]
    with Served([*flags, "--speculative-draft-model-path", str(drafter), "--spec-tokens", "3"]) as served:
        yield served


def check_texts(server: Served, references: list[Reference], concurrency: int) -> list[Answer]:
    bodies = [chat(reference.prompt, max_tokens=MAX_TOKENS) for reference in references]
    answers = server.chat_all(bodies, concurrency)
    for answer, reference in zip(answers, references, strict=True):
        assert answer.text == reference.text
        assert answer.usage["completion_tokens"] == len(reference.answer_ids)
    return answers


def cached(answers: list[Answer]) -> list[int]:
    return [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]


def test_text_is_that_of_transformers_at_any_concurrency_and_after_prefix_hits(
    server: Served, references: list[Reference]
) -> None:
    check_texts(server, references[:4], 1)
    answers = check_texts(server, references, NUM_REQUESTS)
    assert all(answer.speculative["num_draft_tokens"] > 0 for answer in answers)
    again = check_texts(server, references, NUM_REQUESTS)
    for length, answer in zip(cached(again), again, strict=True):
        assert length == (answer.usage["prompt_tokens"] - 1) // 4 * 4
    assert any(answer.usage["prompt_tokens"] % 4 == 0 for answer in again), "some end on a page edge"
    server.check_idle()


@pytest.mark.parametrize("role", ["target", "memsvc"])
def test_a_killed_process_changes_no_text(server: Served, references: list[Reference], role: str) -> None:
    os.kill(server.child(role), signal.SIGKILL)
    check_texts(server, references, NUM_REQUESTS)
    server.check_idle()


@pytest.mark.parametrize("drafts", ["", "3"])
def test_a_tight_pool_retracts_and_changes_no_text(
    server: Served, hybrid: Path, drafter: Path, references: list[Reference], drafts: str
) -> None:
    flags = [*FLAGS, "--model-path", str(hybrid), "--context-length", "256"]
    if drafts:
        flags += ["--speculative-draft-model-path", str(drafter), "--spec-tokens", drafts]
    with Served([*flags, "--mem-bytes", str(tight_pool(server, is_plain=not drafts))]) as tight:
        check_texts(tight, references, NUM_REQUESTS)
        metrics = {sample.name: sample.value for sample in tight.metrics()}
        assert metrics["memsvc_retracts_total"] + metrics["memsvc_no_room_total"] > 0
        tight.check_idle()


def tight_pool(server: Served, is_plain: bool) -> int:
    """Bytes for an eighth of the requests, with what the plan of a server with a drafter says."""
    plan = server.get("/server_info")["memory_plan"]
    kinds = [kind for kind in plan["kinds"] if not (is_plain and kind["name"] == "draft_kv")]
    whole = sum(kind["stride_bytes"] * (kind["pages_per_req"] or 130 / kind["tokens_per_page"]) for kind in kinds)
    return int((0 if is_plain else plan["exchange_bytes"]) + NUM_REQUESTS * whole / 8)


def test_a_perfect_drafter_changes_no_text_and_is_accepted(
    hybrid: Path, drafter: Path, references: list[Reference], tmp_path: Path
) -> None:
    continuations = tmp_path / "continuations.json"
    write_continuations(continuations, [reference.sequence for reference in references])
    flags = [*FLAGS, "--model-path", str(hybrid), "--mem-bytes", "64M", "--spec-tokens", "3"]
    env = {OPTIONS: json.dumps({"continuations": str(continuations)})}
    with Served(
        [*flags, "--speculative-draft-model-path", str(drafter)], module="tests.support.launch_perfect", env=env
    ) as server:
        answers = check_texts(server, references, NUM_REQUESTS)
        whole = [a for a in answers if a.usage["completion_tokens"] == MAX_TOKENS]
        assert whole
        assert min(a.speculative["mean_acceptance_length"] for a in whole) > 3.5
        server.check_idle()
