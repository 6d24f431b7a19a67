"""What users and broken peers send: a clear error each, nothing lost, and the service goes on."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from memsvc.wire.links import LINKS
from tests.support.served import Served, chat
from tests.support.tiny_server import prompt, write_tiny_drafter, write_tiny_model

pytestmark = pytest.mark.slow

CONTEXT = 512
POOL = "256K"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sockets are."""
    return tmp_path_factory.mktemp("run", numbered=True) / "r"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, run_dir: Path) -> Iterator[Served]:
    """A speculative server whose pool is smaller than its context."""
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_model(folder / "tiny")
    drafter = write_tiny_drafter(folder / "drafter", target)
    flags = ["--model-path", str(target), "--speculative-draft-model-path", str(drafter), "--dtype", "float32"]
    flags += ["--page-size", "4", "--threads", "1", "--context-length", str(CONTEXT), "--mem-bytes", POOL]
    flags += ["--chunked-prefill-size", "64", "--max-running-requests", "8", "--run-dir", str(run_dir)]
    with Served(flags) as served:
        yield served


@pytest.fixture(autouse=True)
def _goes_on(server: Served) -> Iterator[None]:
    """After every test the server still answers, and no page is lost."""
    yield
    assert server.post("/v1/chat/completions", chat("red boat", max_tokens=8)).status_code == 200
    server.check_idle()


def refused(reply: httpx.Response, status: int) -> str:
    """The message of an OpenAI error body."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == status
    return error["message"]


def raw(server: Served, content: bytes, **headers: str) -> httpx.Response:
    """A chat request with this body."""
    headers = {"content-type": "application/json"} | headers
    return httpx.post(server.url + "/v1/chat/completions", content=content, headers=headers, timeout=60)


def test_a_request_larger_than_the_pool_is_told_both_sizes(server: Served) -> None:
    message = refused(server.post("/v1/completions", {"prompt": [5] * 400, "max_tokens": 100}), 400)
    assert "frames" in message
    assert "400 tokens" in message


def test_a_prompt_beyond_the_context_is_told_the_limit(server: Served) -> None:
    message = refused(server.post("/v1/completions", {"prompt": [5] * 600, "max_tokens": 1}), 400)
    assert str(CONTEXT) in message
    assert "600" in message
    message = refused(server.post("/v1/completions", {"prompt": [5] * 100, "max_tokens": 1000}), 400)
    assert "1000" in message


@pytest.mark.parametrize("empty", ["", []])
def test_an_empty_prompt_is_refused(server: Served, empty: Any) -> None:
    assert "empty" in refused(server.post("/v1/completions", {"prompt": empty}), 400)


def test_no_messages_are_refused(server: Served) -> None:
    assert "messages" in refused(server.post("/v1/chat/completions", {"messages": []}), 400)


def test_a_token_outside_the_vocabulary_is_refused(server: Served) -> None:
    assert "99999" in refused(server.post("/v1/completions", {"prompt": [5, 99999]}), 400)


@pytest.mark.parametrize(
    "content", [b'{"messages": "\xff\xfe"}', b"\xff\xfe\x00", b"{", b"", b"[]", b"null", b"\x00" * 99]
)
def test_a_body_that_is_no_request_is_refused(server: Served, content: bytes) -> None:
    refused(raw(server, content), 400)


def test_a_body_of_ten_megabytes_is_refused_with_the_limit(server: Served) -> None:
    message = refused(raw(server, b'{"messages": "' + b"a" * 10_000_000 + b'"}'), 413)
    assert any(character.isdigit() for character in message)


def test_a_field_that_is_not_supported_is_named(server: Served) -> None:
    assert "logit_bias" in refused(server.post("/v1/chat/completions", chat("x", logit_bias={"5": 1})), 400)
    assert "colour" in refused(server.post("/v1/chat/completions", chat("x", colour=1)), 400)


def test_a_load_that_mixes_good_and_bad_loses_nothing(server: Served) -> None:
    bad = [{"prompt": [5] * 400, "max_tokens": 100}, {"prompt": ""}, {"prompt": [99999]}]
    good = [chat(prompt(index, 5), max_tokens=20, seed=index) for index in range(12)]
    for body in bad:
        refused(server.post("/v1/completions", body), 400)
    assert len(server.chat_all(good, 12)) == 12


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.name)
def test_garbage_on_a_link_does_not_stop_anyone(server: Served, run_dir: Path, link: Any) -> None:
    kind = zmq.DEALER if link.sockets == "DEALER/ROUTER" else zmq.PUSH
    with zmq.Context() as context, context.socket(kind) as peer:
        peer.setsockopt(zmq.LINGER, 1000)
        peer.connect(link.endpoint(run_dir))
        for frames in (
            [b""],
            [b"\xff" * 40],
            [b"12345678", b"\x93\xa4Step"],
            [b"12345678", b""],
            [b"a", b"b", b"c", b"d"],
        ):
            peer.send_multipart(frames)
        peer.send_multipart([b"12345678", b"\xc1" * (1 << 20)])
    assert server.chat_all([chat("small birds", max_tokens=8)], 1)


def test_garbage_on_the_arena_socket_does_not_stop_anyone(server: Served, run_dir: Path) -> None:
    paths = [path for path in run_dir.iterdir() if path.is_socket()]
    raw_paths = [path for path in paths if path.stem not in {link.name for link in LINKS}]
    assert raw_paths, f"no arena socket among {paths}"
    for path in raw_paths:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(str(path))
            with contextlib.suppress(BrokenPipeError):  # it hangs up once it has given out the arena
                peer.sendall(b"\xff" * 4096)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1e-300, "min_p": 0.5},
        {"repetition_penalty": 0.01, "min_p": 0.5, "temperature": 1e-4},
        {"repetition_penalty": 10, "frequency_penalty": 2, "presence_penalty": -2, "top_k": 1, "top_p": 1e-9},
        {"temperature": 2, "seed": 2**63, "min_p": 1, "min_tokens": 20, "stop": ["a", "ab", "b", "\u00e9"]},
    ],
)
def test_sampling_at_its_limits_is_answered_or_refused(server: Served, options: dict[str, Any]) -> None:
    starts = server.lines.copy()
    reply = server.post("/v1/chat/completions", chat("the river", **({"temperature": 1} | options), max_tokens=20))
    assert reply.status_code in (200, 400), reply.text
    assert not [line for line in server.lines[len(starts) :] if "start role=target" in line]
