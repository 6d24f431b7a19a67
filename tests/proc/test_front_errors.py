"""What a front refuses, and that every refusal is an OpenAI error body that names the fault."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from memsvc.wire.text import ChatPrompt, Submit
from tests.support.front import RunningFront, running_front

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    limits: dict[str, Any] = {"max_body_bytes": 100_000, "max_head_bytes": 20_000}
    with running_front(tmp_path_factory.mktemp("front"), **limits) as running:
        yield running


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == response.status_code
    return body["error"]


def raw_exchange(front: RunningFront, data: bytes) -> bytes:
    host, port = front.client.base_url.host, front.client.base_url.port
    answer = b""
    with socket.create_connection((host, port or 0), timeout=10) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(data)
        while piece := raw.recv(4096):
            answer += piece
    return answer


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 2.5}, "temperature", ["2.5", "2.0"]),
        ({"temperature": -1}, "temperature", ["-1", "0.0"]),
        ({"top_p": 0}, "top_p", ["above 0.0"]),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", ["1e-300", "0.01"]),
        ({"top_k": -2}, "top_k", ["-2"]),
        ({"max_tokens": 0}, "max_tokens", ["0", "1"]),
        ({"max_tokens": "many"}, "max_tokens", ["int"]),
        ({"n": 9}, "n", ["9", "8"]),
        ({"seed": 1 << 63}, "seed", [str(1 << 63)]),
        ({"stop": ["a"] * 5}, "stop", ["5", "4"]),
        ({"stop": ""}, "stop", ["empty"]),
        ({"stop_token_ids": [-1]}, "stop_token_ids", ["-1"]),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", ["9", "3"]),
        ({"cache_salt": "x" * 257}, "cache_salt", ["257", "256"]),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream"]),
        ({"tools": [{"type": "function"}]}, "tools", ["not supported"]),
        ({"logprobs": True}, "logprobs", ["not supported"]),
        ({"logprobs": 0}, "logprobs", ["not supported"]),
        ({"best_of": 2}, "best_of", ["not supported"]),
        ({"response_format": {"type": "json_object"}}, "response_format", ["not supported"]),
        ({"logit_bias": {"5": 1}}, "logit_bias", ["not supported"]),
        ({"max_token": 5}, "max_token", ["did you mean 'max_tokens'"]),
        ({"stream_options": {"nonsense": 1}, "stream": True}, "stream_options", ["nonsense"]),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_limit(
    front: RunningFront, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    response = front.client.post(CHAT, json={"messages": HELLO, **fields})
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ([{"role": "tool", "content": "x"}], "role 'tool'"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": "x", "name": "bob"}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": [{"type": "text2", "text": "x"}]}], "only text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "x", "wat": 1}], "wat"),
        ("hello", "array"),
    ],
)
def test_a_wrong_message_is_refused(front: RunningFront, messages: Any, words: str) -> None:
    response = front.client.post(CHAT, json={"messages": messages})
    assert response.status_code == 400
    assert words in error_of(response)["message"] + str(error_of(response)["param"])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty list"),
        ([[]], "empty list of token ids"),
        (["a", 1], "mixes"),
        ([1, -1], "-1"),
        ([1 << 31], str(1 << 31)),
        ([1] * 129, "129 tokens, limit 128"),
        (["a"] * 65, "65 choices, limit 64"),
        (None, "prompt"),
        ({"a": 1}, "prompt"),
    ],
)
def test_a_wrong_prompt_is_refused(front: RunningFront, prompt: Any, words: str) -> None:
    response = front.client.post(COMPLETIONS, json={"prompt": prompt})
    assert response.status_code == 400
    assert words in error_of(response)["message"] + str(error_of(response)["param"])


def test_fields_that_ask_for_nothing_are_accepted(front: RunningFront) -> None:
    neutral = {
        "logprobs": None, "best_of": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
        "logit_bias": {}, "suffix": None, "echo": False, "top_logprobs": 0, "stop": None, "n": 1, "top_k": -1,
    }  # fmt: skip
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
    ]
    response = front.post(CHAT, messages=messages, **neutral)
    submit = front.engine.expect(Submit)
    front.engine.finish(submit.rid, "fine")
    assert isinstance(submit.prompt, ChatPrompt)
    assert [(m.role, m.content) for m in submit.prompt.messages] == [("system", "a\nb"), ("assistant", "c")]
    assert response.result().status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b"[" * 90_000, b'{"a":' * 15_000],
)
def test_a_body_that_is_no_json_object_is_refused(front: RunningFront, body: bytes) -> None:
    response = front.client.post(COMPLETIONS, content=body)
    assert response.status_code == 400
    error_of(response)


def test_deep_nesting_in_an_unserved_field_is_refused(front: RunningFront) -> None:
    body = b'{"prompt": "x", "logit_bias": ' + b"[" * 40_000 + b"]" * 40_000 + b"}"
    assert front.client.post(COMPLETIONS, content=body).status_code == 400


def test_a_long_body_is_refused_with_both_numbers(front: RunningFront) -> None:
    response = front.client.post(COMPLETIONS, json={"prompt": "x" * 150_000})
    assert response.status_code == 413
    assert "limit 100000" in error_of(response)["message"]
    chunks = (b"x" * 50_000 for _ in range(100))
    # The front stops reading after twice the limit, and the client may see that before the answer.
    with contextlib.suppress(httpx.WriteError, httpx.ReadError):
        assert front.client.post(COMPLETIONS, content=chunks).status_code == 413


def test_a_long_head_is_refused_and_the_connection_closed(front: RunningFront) -> None:
    response = front.client.get("/health", headers={"x-long": "y" * 30_000})
    assert response.status_code == 431
    error_of(response)


def test_an_endless_head_is_cut_off(front: RunningFront) -> None:
    answer = raw_exchange(front, b"GET /health HTTP/1.1\r\nx-long: " + b"y" * 400_000)
    # A reset may overtake the answer, since most of what was sent is never read.
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431")
    assert front.client.get("/health").status_code == 200


def test_garbage_instead_of_http_gets_an_error_body(front: RunningFront) -> None:
    answer = raw_exchange(front, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"invalid_request_error" in answer


def test_unknown_model_route_and_method_are_told_apart(front: RunningFront) -> None:
    response = front.client.post(CHAT, json={"messages": HELLO, "model": "gpt"})
    assert response.status_code == 404
    assert error_of(response)["type"] == "not_found_error"
    assert error_of(front.client.get("/v1/models/gpt"))["code"] == 404
    assert error_of(front.client.get("/nowhere"))["code"] == 404
    response = front.client.get(CHAT)
    assert error_of(response)["code"] == 405
    assert response.headers["allow"] == "POST"


def test_a_form_of_another_site_is_refused(front: RunningFront) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded; charset=utf-8"):
        response = front.client.post(CHAT, content=b'{"messages": []}', headers={"content-type": kind})
        assert response.status_code == 415
        assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_page_of_another_site_cannot_post(front: RunningFront, origin: str) -> None:
    for path, body in (("/flush_cache", b""), ("/v1/chat/completions", b'{"messages": []}')):
        reply = front.client.post(path, content=body, headers={"Origin": origin, "Content-Type": ""})
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_page_of_another_site_cannot_get(front: RunningFront, headers: dict[str, str]) -> None:
    for method, path in (("GET", "/check"), ("HEAD", "/check"), ("GET", "/v1/models"), ("OPTIONS", CHAT),
                         ("GET", "/health"), ("GET", "/metrics"), ("GET", "/nowhere")):  # fmt: skip
        reply = front.client.request(method, path, headers=headers)
        assert reply.status_code == 403
        if method != "HEAD":
            assert "only those of this server's own" in error_of(reply)["message"]


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_what_a_user_types_and_a_page_of_its_own_can_get(front: RunningFront, site: str) -> None:
    own = f"http://127.0.0.1:{front.client.base_url.port}"
    for headers in ({"Sec-Fetch-Site": site}, {"Sec-Fetch-Site": site, "Origin": own}):
        assert front.client.get("/v1/models", headers=headers).status_code == 200


def test_a_page_whose_name_resolves_to_this_machine_cannot_even_get(front: RunningFront) -> None:
    headers = {"Host": "evil.example:30000", "Origin": "http://evil.example:30000"}
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/health"), ("GET", "/check"),
                         ("HEAD", "/health"), ("OPTIONS", CHAT), ("POST", CHAT), ("POST", "/flush_cache")):  # fmt: skip
        reply = front.client.request(method, path, headers=headers)
        assert reply.status_code == 403
        if method != "HEAD":
            assert "evil.example:30000" in error_of(reply)["message"]
    port = front.client.base_url.port
    assert front.client.get("/v1/models", headers={"Host": f"localhost:{port}"}).status_code == 200


def test_request_id_is_echoed_or_made(front: RunningFront) -> None:
    assert front.client.get("/v1/models", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert front.client.get("/nowhere", headers={"x-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"
    made = front.client.get("/v1/models", headers={"x-request-id": "has space"}).headers["x-request-id"]
    assert len(made) == 32


def test_every_route_but_health_asks_for_the_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_front(tmp_path_factory.mktemp("front"), api_key="sesame") as front:
        with httpx.Client(base_url=front.client.base_url, trust_env=False) as stranger:
            assert stranger.get("/health").status_code == 200
            for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", CHAT), ("GET", "/nowhere"),
                                 ("POST", "/flush_cache"), ("GET", "/server_info")):  # fmt: skip
                response = stranger.request(method, path)
                assert error_of(response)["type"] == "authentication_error"
                assert response.status_code == 401
            wrong = {"authorization": "Bearer sesame2"}
            # A proxy may pass the name on under which it was asked.
            assert front.client.get("/v1/models", headers={"Host": "llm.example"}).status_code == 200
            assert stranger.get("/v1/models", headers=wrong).status_code == 401
        assert front.client.get("/v1/models").status_code == 200
