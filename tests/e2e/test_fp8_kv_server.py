"""Keys and values in 8 bits: drafts, batches and the cache hardly change a text, and more tokens fit."""

import pytest

from tests.support.embedded_model import EMBEDDED, OPENINGS
from tests.support.served import Answer, Served, chat

pytestmark = pytest.mark.slow

FLAGS = ["--model-path", str(EMBEDDED), "--dtype", "float32", "--threads", "1", "--mem-bytes", "64M"]
FLAGS += ["--max-running-requests", "8", "--chunked-prefill-size", "64"]
TARGET, DRAFT = "--kv-cache-dtype", "--speculative-draft-kv-cache-dtype"
FP8 = "fp8_e4m3"


def answers(server: Served, concurrency: int) -> list[Answer]:
    """To all openings: greedy, then sampled."""
    bodies = [chat(text, max_tokens=32) for text in OPENINGS]
    bodies += [chat(text, temperature=0.8, seed=i, max_tokens=24) for i, text in enumerate(OPENINGS)]
    return server.chat_all(bodies, concurrency)


def texts(found: list[Answer]) -> list[str]:
    return [answer.text for answer in found]


def pool_tokens(server: Served) -> int:
    return server.get("/server_info")["max_total_num_tokens"]


def num_changed(found: list[Answer], wanted: list[str]) -> int:
    return sum(text != other for text, other in zip(texts(found), wanted, strict=True))


def test_drafts_batches_and_the_cache_hardly_change_a_text_in_8_bits():
    with Served([*FLAGS, TARGET, FP8, "--speculative-algorithm", "none"]) as server:
        plain = texts(answers(server, 1))
        assert [line for line in server.lines if "kv=fp8_e4m3" in line]
    with Served([*FLAGS, TARGET, FP8, DRAFT, FP8, "--spec-tokens", "5"]) as server:
        first, again = answers(server, 8), answers(server, 3)
        fp8_tokens = pool_tokens(server)
    # A number beside a tie is rounded otherwise where a sum differs in its last bit: on this or that CPU one of them may.
    few = len(plain) // 10
    assert max(num_changed(first, plain), num_changed(again, plain)) <= few
    assert sum(answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in again) > 0
    accepted, steps = (
        sum(answer.speculative[name] for answer in first) for name in ("num_accepted_draft_tokens", "num_spec_steps")
    )
    assert accepted > 0.5 * steps, f"{accepted} drafts accepted in {steps} blocks"
    with Served([*FLAGS, "--spec-tokens", "5"]) as server:
        whole = answers(server, 8)
        assert fp8_tokens > 2 * pool_tokens(server)
    assert num_changed(whole, plain) > 2 * few, "fp8 pages gave the texts of float32 pages: were they used?"
