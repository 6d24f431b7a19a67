"""The trained hybrid and its trained drafter: text is transformers' text, while most drafts that count are real ones."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.embedded_model import EMBEDDED, EMBEDDED_DRAFT, OPENINGS, ROOT, write_unpacked
from tests.support.reference import Reference, greedy_answers
from tests.support.served import Answer, Served, chat

pytestmark = pytest.mark.slow

FLAGS = ["--model-path", str(EMBEDDED), "--dtype", "float32", "--threads", "1"]
# A step may write as many tokens past the window as it computes.
FLAGS += ["--chunked-prefill-size", "64", "--max-running-requests", "8"]
NO_NETWORK = ROOT / "tests" / "support" / "no_network"
MAX_TOKENS = 32
WINDOW = 128
"""Of the drafter, in tokens."""


@dataclass(frozen=True, slots=True)
class Offline:
    """Environment of a machine that has never been on a network, and what was left there."""

    home: Path
    tries: Path

    @property
    def env(self) -> dict[str, str]:
        """Empty counts as not set for all of them."""
        names = [f"{kind}_proxy" for kind in ("http", "https", "all", "no")]
        caches = ["XDG_CACHE_HOME", "MEMSVC_CACHE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"]
        unset = dict.fromkeys([*names, *map(str.upper, names), *caches], "")
        return unset | {"HOME": str(self.home), "PYTHONPATH": str(NO_NETWORK), "NETWORK_TRIES": str(self.tries)}


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Offline:
    folder = tmp_path_factory.mktemp("offline")
    (folder / "home").mkdir()
    return Offline(folder / "home", folder / "tries")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    """Greedy answers of transformers to all openings, and to a long prompt, which is the last one."""
    unpacked = write_unpacked(tmp_path_factory.mktemp("unpacked") / "tiny-hybrid")
    return greedy_answers(unpacked, [*OPENINGS, long_text()], MAX_TOKENS, 1)


@pytest.fixture(scope="module")
def server(offline: Offline) -> Iterator[Served]:
    """With the drafter that it finds, and widths of its own choice."""
    with Served([*FLAGS, "--mem-bytes", "64M"], env=offline.env) as served:
        yield served


@dataclass(frozen=True, slots=True)
class Plain:
    """What comes without speculation."""

    greedy: list[Answer]
    sampled: list[str]


@pytest.fixture(scope="module")
def plain(references: list[Reference]) -> Plain:
    """All of it at once."""
    with Served([*FLAGS, "--mem-bytes", "64M", "--speculative-algorithm", "none"]) as served:
        bodies = [chat(reference.prompt, max_tokens=MAX_TOKENS) for reference in references]
        return Plain(served.chat_all(bodies, 8), sampled(served))


def sampled(server: Served) -> list[str]:
    """Texts at temperature 0.8, each with its seed, eight at a time."""
    bodies = [chat(text, temperature=0.8, seed=i, max_tokens=24) for i, text in enumerate([*OPENINGS, long_text()])]
    return [answer.text for answer in server.chat_all(bodies, 8)]


def long_text() -> str:
    """A prompt ten times as long as the drafter's window."""
    return (ROOT / "LICENSE").read_text("utf-8")[:4200]


def check_greedy(server: Served, references: Sequence[Reference], concurrency: int) -> list[Answer]:
    """Every answer equals transformers'."""
    bodies = [chat(reference.prompt, max_tokens=MAX_TOKENS) for reference in references]
    answers = server.chat_all(bodies, concurrency)
    for answer, reference in zip(answers, references, strict=True):
        check_answer(answer, reference)
    return answers


def check_answer(answer: Answer, reference: Reference) -> None:
    """It is transformers', token for token."""
    assert answer.text == reference.text
    assert answer.usage["prompt_tokens"] == len(reference.prompt_ids)
    assert answer.usage["completion_tokens"] == len(reference.answer_ids)


def cached(answers: Sequence[Answer]) -> list[int]:
    """Tokens of each prompt that were in the cache."""
    return [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]


def accept_length(answers: Sequence[Answer]) -> float:
    """Mean tokens of a block, the target's own included."""
    accepted = sum(answer.speculative["num_accepted_draft_tokens"] for answer in answers)
    return 1 + accepted / sum(answer.speculative["num_spec_steps"] for answer in answers)


def metric(server: Served, name: str, **labels: str) -> float:
    """The sum of the samples of that name that carry these labels."""
    return sum(s.value for s in server.metrics() if s.name == name and labels.items() <= s.labels.items())


def test_the_guard_against_the_network_sees_who_tries(offline: Offline) -> None:
    code = (
        "import urllib.request as u\ntry: u.urlopen('http://192.0.2.1:9/x', timeout=1)\nexcept OSError as e: print(e)"
    )
    tried = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | offline.env, capture_output=True, text=True, check=True
    )
    assert "there is no network here" in tried.stdout
    assert "192.0.2.1" in offline.tries.read_text()
    offline.tries.unlink()


def test_it_starts_without_network_and_cache_and_finds_its_drafter(server: Served, offline: Offline) -> None:
    assert [model["id"] for model in server.get("/v1/models")["data"]] == [EMBEDDED.name]
    assert [line for line in server.lines if f"drafter={EMBEDDED_DRAFT}, found with the model" in line]
    assert server.get("/server_info")["speculative_widths"] == [0, 1, 2, 3, 5, 7]
    assert server.post("/v1/completions", {"prompt": "import ", "max_tokens": 4}).status_code == 200
    assert not offline.tries.exists(), offline.tries.read_text()
    assert list(offline.home.rglob("*")) == []


def test_a_chat_is_its_messages_a_line_each(server: Served) -> None:
    turns = [{"role": "user", "content": OPENINGS[0]}, {"role": "assistant", "content": OPENINGS[1]}]
    body = {"temperature": 0, "max_tokens": 24}
    chatted = server.post("/v1/chat/completions", {"messages": turns, **body}).json()
    prompt = f"{OPENINGS[0]}\n{OPENINGS[1]}\n"
    completed = server.post("/v1/completions", {"prompt": prompt, **body}).json()
    assert chatted["choices"][0]["message"]["content"] == completed["choices"][0]["text"] != ""
    assert chatted["usage"]["prompt_tokens"] == completed["usage"]["prompt_tokens"]


def test_plain_decoding_gives_the_text_of_transformers(references: list[Reference], plain: Plain) -> None:
    for answer, reference in zip(plain.greedy, references, strict=True):
        check_answer(answer, reference)


def test_widths_of_its_own_choice_change_no_text(server: Served, references: list[Reference], plain: Plain) -> None:
    cold = check_greedy(server, references, 8)
    warm = check_greedy(server, references[::3], 1)
    assert cached(warm) == [(answer.usage["prompt_tokens"] - 1) // 16 * 16 for answer in cold[::3]]
    assert sampled(server) == plain.sampled
    assert metric(server, "memsvc_spec_accepted_tokens_total") > 0
    server.check_idle()


@pytest.mark.parametrize("drafts", ["3", "7"])
def test_a_small_pool_changes_no_text_and_keeps_of_drafts_what_the_window_shows(
    server: Served, references: list[Reference], plain: Plain, drafts: str
) -> None:
    middle, long = references[1], references[-1]
    size = small_pool(server.get("/server_info")["memory_plan"], len(long.sequence))
    with Served([*FLAGS, "--spec-tokens", drafts, "--mem-bytes", str(size)]) as small:
        wait_for_drafts(small)
        cold = check_greedy(small, [long], 1)
        check_window(small, len(long.sequence))
        check_hit(cold, check_greedy(small, [long], 1))
        check_hit(*(check_greedy(small, [middle], 1) for _ in range(2)))
        answers = check_greedy(small, references[:-1], 8)
        assert metric(small, "memsvc_evicted_pages_total", kind="target_kv") > 0
        assert accept_length(answers) > 1.8
        assert sampled(small) == plain.sampled
        small.check_idle()


def small_pool(plan: dict[str, Any], num_tokens: int) -> int:
    """Bytes for one request of so many tokens if three fifths of its draft KV go away."""
    frames = 1 + -(-plan["exchange_bytes"] // plan["frame_bytes"])
    for kind in plan["kinds"]:
        pages = kind["pages_per_req"] or -(-num_tokens // kind["tokens_per_page"])
        whole = -(-pages // kind["pages_per_frame"])
        frames += whole * 2 // 5 if kind["window"] else whole
    return frames * plan["frame_bytes"]


def wait_for_drafts(server: Served) -> None:
    """A server is ready before its drafter is. These requests are too short to leave a page behind."""
    (answer,) = server.chat_all([chat("x", max_tokens=6, ignore_eos=True)], 1)
    while not answer.speculative.get("num_draft_tokens"):
        time.sleep(0.02)
        (answer,) = server.chat_all([chat("x", max_tokens=6, ignore_eos=True)], 1)


def check_hit(cold: Sequence[Answer], warm: Sequence[Answer]) -> None:
    """All but the last page of the prompts came from the cache, and drafts are those of a cold start."""
    assert not any(cached(cold))
    assert cached(warm) == [(answer.usage["prompt_tokens"] - 1) // 16 * 16 for answer in warm]
    assert [answer.speculative for answer in warm] == [answer.speculative for answer in cold]


def check_window(server: Served, num_tokens: int) -> None:
    """One request of so many tokens has run and nothing else: draft pages had to go, and nothing that is still read."""
    assert metric(server, "memsvc_retracts_total") == metric(server, "memsvc_no_room_total") == 0
    assert metric(server, "memsvc_evicted_pages_total", kind="target_kv") == 0
    pages = {kind: metric(server, "memsvc_pages", kind=kind, state="tree") for kind in ("target_kv", "draft_kv")}
    assert pages["target_kv"] == (num_tokens - 1) // 16
    assert WINDOW // 16 <= pages["draft_kv"] <= pages["target_kv"] / 2
    evicted = metric(server, "memsvc_evicted_pages_total", kind="draft_kv")
    assert evicted + pages["draft_kv"] == pages["target_kv"]
