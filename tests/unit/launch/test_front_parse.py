"""Whatever a body holds, it becomes a request or a 4xx that says why."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.http.config import FrontConfig
from launch.http.errors import ApiError
from launch.http.generation import Generation, from_chat, from_completion
from launch.http.openai import NOT_SERVED, ChatRequest, CompletionRequest
from launch.http.parse import parse
from memsvc.wire.codec import encode

CONFIG = FrontConfig(run_dir="", model_path="/m", served_model_names=("m",), context_len=64)
FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *NOT_SERVED, "odd"})

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)
prompts = st.text() | st.lists(st.integers(-5, 1 << 32), max_size=4) | st.lists(st.text(), max_size=4) | values
contents = st.text() | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()}), max_size=2)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": contents})
)


def read(body: bytes, is_chat: bool) -> Generation | ApiError:
    try:
        if is_chat:
            return from_chat(parse(body, ChatRequest), CONFIG)
        return from_completion(parse(body, CompletionRequest), CONFIG)
    except ApiError as error:
        return error


def check(result: Generation | ApiError) -> None:
    if isinstance(result, ApiError):
        assert 400 <= result.status < 500
        assert json.loads(result.body())["error"]["message"]
        return
    for index in range(result.num_choices):
        sampling = result.sampling_of(index)
        encode(sampling)
        assert 0 <= sampling.seed < 1 << 63
        assert 0.0 <= sampling.temperature <= 2.0
        assert 0.0 < sampling.top_p <= 1.0
        assert sampling.top_k >= 0


@given(bodies, prompts)
def test_any_completion_body_is_read_or_refused(body: dict[str, Any], prompt: Any):
    check(read(json.dumps({**body, "prompt": prompt}).encode(), is_chat=False))


@given(bodies, messages)
def test_any_chat_body_is_read_or_refused(body: dict[str, Any], turns: Any):
    check(read(json.dumps({**body, "messages": turns}).encode(), is_chat=True))


@given(st.binary())
def test_any_bytes_are_read_or_refused(body: bytes):
    check(read(body, is_chat=False))
    check(read(body, is_chat=True))


@pytest.mark.parametrize(("name", "neutral"), [(name, value) for name, row in NOT_SERVED.items() for value in row])
def test_a_value_that_asks_for_nothing_is_accepted(name: str, neutral: Any):
    assert isinstance(read(json.dumps({"prompt": "x", name: neutral}).encode(), is_chat=False), Generation)


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_null_is_accepted_and_anything_else_is_refused_by_name(name: str):
    assert isinstance(read(json.dumps({"prompt": "x", name: None}).encode(), is_chat=False), Generation)
    refused = read(json.dumps({"prompt": "x", name: [["odd"]]}).encode(), is_chat=False)
    assert isinstance(refused, ApiError)
    assert (refused.status, refused.param) == (400, name)


def test_a_request_without_a_seed_gets_one_of_its_own():
    seeds = set()
    for _ in range(5):
        result = read(b'{"prompt": "x"}', is_chat=False)
        assert isinstance(result, Generation)
        seeds.add(result.sampling.seed)
    assert len(seeds) == 5


def test_negative_seeds_are_kept_apart():
    def seed_of(seed: int) -> int:
        result = read(json.dumps({"prompt": "x", "seed": seed}).encode(), is_chat=False)
        assert isinstance(result, Generation)
        return result.sampling.seed

    assert len({seed_of(seed) for seed in (-3, -2, -1, 0, 1, 2)}) == 6
    assert seed_of(5) == 5
