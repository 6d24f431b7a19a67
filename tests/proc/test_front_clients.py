"""Clients that leave, come in too great numbers, or are cut off by a stop."""

import contextlib
import socket
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import httpx
import msgspec
import pytest

from memsvc.wire.text import Abort, Submit
from tests.support.front import RunningFront, running_front, text_of

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    limits: dict[str, Any] = {"max_running_requests": 1, "max_queued_requests": 2, "max_connections": 20}
    with running_front(tmp_path_factory.mktemp("front"), **limits) as running:
        yield running


def connect(front: RunningFront) -> socket.socket:
    url = front.client.base_url
    return socket.create_connection((url.host, url.port or 0), timeout=10)


def post_raw(front: RunningFront, **body: Any) -> socket.socket:
    data = msgspec.json.encode({"messages": HELLO, **body})
    raw = connect(front)
    raw.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(data) + data
    )
    return raw


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_text", [False, True])
def test_a_client_that_hangs_up_ends_its_request(front: RunningFront, stream: bool, after_text: bool) -> None:
    raw = post_raw(front, stream=stream, n=2)
    first, second = front.engine.expect(Submit), front.engine.expect(Submit)
    if after_text:
        front.engine.say(first.rid, "some text")
        if stream:
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
    raw.close()
    assert {front.engine.expect(Abort).rid, front.engine.expect(Abort).rid} == {first.rid, second.rid}
    # Its place is free again, and what still comes for it hurts nobody.
    front.engine.say(second.rid, "late")
    # The text before the end may have come after it too, and is then answered in the same way.
    while (rid := front.engine.expect(Abort).rid) != second.rid:
        assert (rid, after_text, stream) == (first.rid, True, False)
    front.engine.finish(second.rid, "late")
    response = front.post(CHAT, messages=HELLO, n=3)
    for submit in [front.engine.expect(Submit) for _ in range(3)]:
        front.engine.finish(submit.rid, "x")
    assert response.result().status_code == 200


def test_a_finished_answer_is_not_aborted(front: RunningFront) -> None:
    for stream in (False, True):
        raw = post_raw(front, stream=stream)
        submit = front.engine.expect(Submit)
        front.engine.finish(submit.rid, "x")
        answer = b""
        while (b"[DONE]" if stream else b"finish_reason") not in answer:
            answer += raw.recv(4096)
        raw.close()
    assert not front.engine.has_message(within_ms=100)


def test_a_client_that_hangs_up_in_its_body_leaves_nothing(front: RunningFront) -> None:
    raw = connect(front)
    raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{")
    raw.close()
    assert front.client.get("/v1/models").status_code == 200
    assert not front.engine.has_message()


def test_past_the_queue_limit_a_client_is_told_to_come_again(front: RunningFront) -> None:
    running = [front.post(CHAT, messages=HELLO) for _ in range(3)]
    submits = [front.engine.expect(Submit) for _ in range(3)]
    refused = front.client.post(CHAT, json={"messages": HELLO})
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "limit 3" in refused.json()["error"]["message"]
    assert refused.json()["error"]["type"] == "rate_limit_error"
    front.engine.finish(submits[0].rid, "x")
    futures.wait(running, timeout=10, return_when=futures.FIRST_COMPLETED)
    again = front.post(CHAT, messages=HELLO)
    submits.append(front.engine.expect(Submit))
    for submit in submits[1:]:
        front.engine.finish(submit.rid, "x")
    assert [response.result().status_code for response in [*running, again]] == [200] * 4


def test_more_connections_than_allowed_are_answered_and_closed(front: RunningFront) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(front))
        with connect(front) as extra:
            assert extra.recv(100).startswith(b"HTTP/1.1 503")
    # The front learns of the closed ones in its own time.
    while front.client.get("/health").status_code != 200:
        pass


def test_garbage_on_every_link_is_counted_and_harms_nothing(front: RunningFront) -> None:
    front.engine.garbage()
    response = front.post(CHAT, messages=HELLO)
    submit = front.engine.expect(Submit)
    front.engine.finish(submit.rid, "still here")
    assert response.result().json()["choices"][0]["message"]["content"] == "still here"
    front.wait_for_metric("memsvc_front_bad_frames_total", 9.0)
    metrics = front.get("/metrics").result().text
    assert metrics.count("memsvc_front_bad_frames_total{") == 3


def test_a_stop_cuts_answers_off_with_an_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        streaming = front.stream(CHAT, messages=HELLO)
        submit = front.engine.expect(Submit)
        front.engine.say(submit.rid, "begun")
        assert text_of([streaming.next(), streaming.next()]) == "begun"
        waiting = front.post(CHAT, messages=HELLO)
        front.engine.expect(Submit)
        front.process.terminate()
        assert waiting.result().status_code == 503
        assert streaming.rest()[0]["error"]["code"] == 503
        assert front.process.wait(10) == 0


def test_while_draining_running_answers_end_and_new_ones_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_front(tmp_path_factory.mktemp("front"), drain_s=20.0) as front:
        response = front.post(CHAT, messages=HELLO)
        submit = front.engine.expect(Submit)
        front.process.terminate()
        while front.client.get("/health").status_code == 200:
            pass
        refused = front.client.post(CHAT, json={"messages": HELLO})
        assert refused.status_code == 503
        front.engine.finish(submit.rid, "done")
        assert response.result().json()["choices"][0]["message"]["content"] == "done"
        assert front.process.wait(10) == 0
        with pytest.raises(httpx.TransportError):
            front.client.get("/health")
