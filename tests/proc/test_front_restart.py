"""Other processes die and come back: requests in flight are sent again, and their clients notice nothing."""

import time
from collections.abc import Iterator

import httpx
import pytest

from launch.http.listen import bind_tcp, url_of
from memsvc.wire.base import unpack_tokens
from memsvc.wire.control import Ready
from memsvc.wire.text import Abort, AbortAll, Submit, Usage
from tests.support.front import RunningFront, make_config, running_front, start_process, text_of

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    with running_front(tmp_path_factory.mktemp("front")) as running:
        yield running


def first_answer(url: str) -> dict[str, object]:
    """Of a server that may not listen yet."""
    while True:
        try:
            return httpx.get(url, timeout=20, trust_env=False).json()
        except httpx.ConnectError:
            time.sleep(0.01)


def wait_health(front: RunningFront, status: int) -> dict[str, object]:
    while (response := front.client.get("/health")).status_code != status:
        pass
    return response.json()


@pytest.mark.parametrize("role", ["target", "tokenizer"])
def test_a_stream_goes_on_without_a_seam_after_a_restart(front: RunningFront, role: str) -> None:
    events = front.stream(CHAT, messages=HELLO, seed=5, max_tokens=9)
    first = front.engine.expect(Submit)
    front.engine.accept(first)
    front.engine.say(first.rid, "one two ", [1, 2])
    assert text_of([events.next(), events.next()]) == "one two "
    if role == "tokenizer":
        front.engine.kill_tokenizer()
    front.engine.peer_down(role)
    assert wait_health(front, 503)["reasons"] == [f"{role} is not up"]
    if role == "tokenizer":
        front.engine.start_tokenizer()
    front.engine.peer_up(role)
    front.engine.expect(AbortAll)
    second = front.engine.expect(Submit)
    assert second.rid != first.rid
    assert unpack_tokens(second.resumed) == [1, 2]
    assert (second.prompt, second.sampling) == (first.prompt, first.sampling)
    # Output of the old life that was still on its way must not be shown twice.
    front.engine.say(first.rid, "two three ", [2, 3])
    assert front.engine.expect(Abort).rid == first.rid
    front.engine.say(second.rid, "three", [3])
    front.engine.finish(second.rid, usage=Usage(7, 3, 0))
    rest = events.rest()
    assert text_of(rest) == "three"
    assert rest[-1] == "[DONE]"


def test_output_between_death_and_restart_is_not_lost(front: RunningFront) -> None:
    before = front.metric("memsvc_time_to_first_token_seconds_count")
    response = front.post(CHAT, messages=HELLO)
    first = front.engine.expect(Submit)
    front.engine.peer_down("target")
    wait_health(front, 503)
    front.engine.say(first.rid, "late but whole ", [4, 5, 6])
    while front.metric("memsvc_time_to_first_token_seconds_count") == before:
        pass
    front.engine.peer_up("target")
    front.engine.expect(AbortAll)
    second = front.engine.expect(Submit)
    assert unpack_tokens(second.resumed) == [4, 5, 6]
    front.engine.finish(second.rid, "text")
    assert response.result().json()["choices"][0]["message"]["content"] == "late but whole text"


@pytest.mark.parametrize("role", ["memsvc", "target", "tokenizer", "draft"])
def test_health_names_a_process_that_hangs_and_streams_go_on_when_it_does(front: RunningFront, role: str) -> None:
    if role == "draft":
        front.engine.peer_up("draft")
    events = front.stream(CHAT, messages=HELLO, max_tokens=9)
    submit = front.engine.expect(Submit)
    front.engine.peer_silent(role)
    assert wait_health(front, 503)["reasons"] == [f"{role} gives no sign of life"]
    front.engine.peer_heard(role)
    assert wait_health(front, 200) == {"status": "ok"}
    front.engine.finish(submit.rid, "done")
    assert text_of(events.rest()) == "done"
    assert not front.engine.has_message()


def test_the_death_of_a_process_that_hangs_ends_its_silence(front: RunningFront) -> None:
    front.engine.peer_silent("target")
    wait_health(front, 503)
    front.engine.peer_down("target")
    while wait_health(front, 503)["reasons"] != ["target is not up"]:
        pass
    front.engine.peer_up("target")
    front.engine.expect(AbortAll)
    wait_health(front, 200)


def test_requests_that_come_while_a_process_is_down_are_held(front: RunningFront) -> None:
    front.engine.peer_down("memsvc")
    front.engine.peer_down("target")
    wait_health(front, 503)
    held = [front.post(CHAT, messages=HELLO, seed=seed) for seed in range(3)]
    while front.client.get("/server_info").json()["internal_states"][0]["num_live_reqs"] < 3:
        pass
    assert not front.engine.has_message()
    front.engine.peer_up("memsvc")
    front.engine.peer_up("target")
    front.engine.expect(AbortAll)
    for _ in held:
        submit = front.engine.expect(Submit)
        front.engine.finish(submit.rid, str(submit.sampling.seed))
    texts = [response.result().json()["choices"][0]["message"]["content"] for response in held]
    assert texts == ["0", "1", "2"]


def test_a_draft_that_restarts_changes_nothing_for_requests(front: RunningFront) -> None:
    front.engine.peer_up("draft")
    response = front.post(CHAT, messages=HELLO)
    submit = front.engine.expect(Submit)
    starts = front.metric("memsvc_process_starts")
    front.engine.peer_down("draft")
    front.engine.peer_up("draft")
    while front.metric("memsvc_process_starts") == starts:
        pass
    assert not front.engine.has_message()
    front.engine.finish(submit.rid, "x")
    assert response.result().status_code == 200


def test_a_new_front_ends_what_the_old_one_left_and_shares_no_ids(front: RunningFront) -> None:
    # The last test of this file: nothing else finds the front that it kills.
    old = front.post(CHAT, messages=HELLO)
    left_behind = front.engine.expect(Submit)
    front.process.kill()
    front.process.wait()
    assert old.exception() is not None
    with bind_tcp("127.0.0.1", 0) as listener:
        url, fd = url_of(listener), listener.fileno()
        second = start_process(make_config(front.engine.run_dir, generation=2, listen_fd=fd), pass_fds=(fd,))
    try:
        asked = front.pool.submit(first_answer, f"{url}/server_info")
        # It listens by now, and would say that nobody serves, which is not so.
        with pytest.raises(TimeoutError):
            asked.result(2.0)
        front.engine.peer_list()
        front.engine.expect(AbortAll)
        told = {role: {"up": True, "generation": num} for role, num in front.engine.generations.items()}
        assert asked.result(10.0)["processes"] == told | {"front": {"up": True, "generation": 2}}
        ready = front.engine.expect_launch(Ready)
        assert ready.lines[0] == f"url={url}"
        front.client.base_url = url
        response = front.post(CHAT, messages=HELLO)
        submit = front.engine.expect(Submit)
        assert submit.rid > left_behind.rid + (1 << 39)
        front.engine.finish(submit.rid, "x")
        assert response.result().status_code == 200
    finally:
        second.terminate()
        assert second.wait(10) == 0
