"""The load generator against a fake server in the same event loop."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.load.call import Call, Outcome
from tests.load.options import LoadOptions
from tests.load.prompts import make_prompts
from tests.load.report import make_report, verdict
from tests.load.run import RunResult, run_load
from tests.support.fake_openai import FakeOpenAI

_CLEAN = {"leaked_bytes": 0, "problems": [], "pages": {"target_kv": {"free": 7, "private": 0, "tree": 3}}}


def run_against(fake: FakeOpenAI, **options: Any) -> RunResult:
    async def go() -> RunResult:
        async with fake.serve() as url:
            return await run_load(LoadOptions(**{"url": url, "concurrency": 3, "requests": 6, "settle": 0.0} | options))

    return asyncio.run(go())


def report_of(fake: FakeOpenAI, **options: Any) -> dict[str, Any]:
    result = run_against(fake, **options)
    return make_report(result, LoadOptions(url="http://x", **options))


@pytest.mark.parametrize("chat", [True, False])
def test_both_routes_yield_text_and_figures(chat: bool):
    fake = FakeOpenAI(check=_CLEAN)
    result = run_against(fake, chat=chat)
    report = make_report(result, LoadOptions(url="http://x"))
    assert [call.text for call in result.calls] == ["one two three"] * 6
    assert (report["completed"], report["failed"], report["disconnected"]) == (6, 0, 0)
    assert report["output_tokens"] == 36
    assert report["cached_tokens"] == 24
    assert report["accept_length"] == 2.5
    assert report["leaked_bytes"] == report["held_pages"] == 0
    assert report["ttft_ms_p50"] > 0
    assert report["tpot_ms_p50"] >= 0
    assert verdict(report) == ""
    json.dumps(report)


def test_body_asks_for_what_the_options_say():
    fake = FakeOpenAI()
    run_against(fake, requests=2, concurrency=1, max_tokens=9, temperature=0.5, seed=40, ignore_eos=True, api_key="k")
    body = fake.bodies[1]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 9, 0.5)
    assert (body["seed"], body["ignore_eos"], body["stream"]) == (41, True, True)
    assert body["stream_options"] == {"include_usage": True}
    assert fake.keys == {"Bearer k"}


def test_exactly_concurrency_requests_run_at_a_time(monkeypatch: pytest.MonkeyPatch):
    running: set[int] = set()
    most: list[int] = []

    async def slow_call(call: Call, *_: object) -> None:
        running.add(call.index)
        for _turn in range(5):
            await asyncio.sleep(0)
        most.append(len(running))
        running.remove(call.index)

    monkeypatch.setattr("tests.load.run.make_call", slow_call)
    run_against(FakeOpenAI(), requests=12, concurrency=4)
    assert len(most) == 12
    assert max(most) == 4


def test_an_http_error_is_a_failure_with_the_servers_words():
    report = report_of(FakeOpenAI(status=503))
    assert (report["completed"], report["failed"]) == (0, 6)
    assert report["errors"] == [{"kind": "HTTP 503", "count": 6, "example": "not today"}]
    assert verdict(report) == "6 requests failed"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [({"drop_after": 2}, "connection"), ({"error_after": 1}, "error in the answer: internal")],
)
def test_a_stream_that_breaks_is_a_failure(fault: dict[str, Any], kind: str):
    report = report_of(FakeOpenAI(**fault))
    assert report["failed"] == 6
    assert [error["kind"] for error in report["errors"]] == [kind]


def test_a_silent_server_runs_into_the_timeout():
    report = report_of(FakeOpenAI(hang=True), requests=2, concurrency=2, timeout=0.05)
    assert [(e["kind"], e["count"]) for e in report["errors"]] == [("timeout", 2)]


def test_hang_ups_are_streaming_and_not_and_no_failures():
    fake = FakeOpenAI(hang=True, check=_CLEAN)
    result = run_against(fake, requests=16, concurrency=16, disconnect=1.0, hang_up_s=0.2)
    assert {call.outcome for call in result.calls} == {Outcome.DISCONNECTED}
    assert {call.stream for call in result.calls} == {True, False}
    assert {body["stream"] for body in fake.bodies} == {True, False}
    assert fake.num_hang_ups >= len(fake.bodies)


def test_who_hangs_up_depends_on_the_seed_alone():
    def hang_up_points(seed: int) -> list[float | None]:
        result = run_against(FakeOpenAI(), requests=20, disconnect=0.5, seed=seed)
        return [call.hang_up_point for call in result.calls]

    assert hang_up_points(1) == hang_up_points(1) != hang_up_points(2)
    assert 4 < sum(point is not None for point in hang_up_points(1)) < 16


def test_accept_length_comes_from_the_counters_if_answers_carry_none():
    report = report_of(FakeOpenAI(with_metrics=False, spec_counters=(100, 7)))
    assert report["accept_length"] == 3.0


def test_accept_length_is_unknown_if_nobody_tells():
    assert report_of(FakeOpenAI(with_metrics=False))["accept_length"] is None


def test_without_usage_chunks_are_counted_and_the_report_says_so():
    report = report_of(FakeOpenAI(with_usage=False, with_metrics=False))
    assert report["without_usage"] == 6
    assert report["output_tokens"] == 18


def test_leaks_held_pages_and_problems_come_from_the_check():
    check = {"leaked_bytes": 64, "problems": [{"what": "lost"}], "pages": {"a": {"limbo": 2, "private": 1, "tree": 9}}}
    report = report_of(FakeOpenAI(check=check))
    assert (report["leaked_bytes"], report["held_pages"]) == (64, 3)
    assert verdict(report) == "64 bytes leaked, the service's check found 1 problems"


def test_a_server_without_a_check_leaves_leaked_bytes_unknown():
    report = report_of(FakeOpenAI())
    assert report["leaked_bytes"] is None
    assert verdict(report) == ""


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ConnectionError, match="no connection to 127"):
        asyncio.run(run_load(LoadOptions(url="http://127.0.0.1:9")))


def test_token_ids_are_made_up_by_seed_below_the_given_number():
    options = LoadOptions(url="http://x", chat=False, token_ids=50, prompt_tokens=7, requests=3, shared_prefix=2)
    prompts = make_prompts(options)
    assert prompts == make_prompts(options) != make_prompts(replace(options, seed=1))
    assert all(isinstance(prompt, list) and len(prompt) == 9 and prompt[:2] == prompts[0][:2] for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert all(0 <= token_id < 50 for prompt in prompts for token_id in prompt)
    with pytest.raises(ValueError, match="--token-ids makes prompts up, for --completions"):
        LoadOptions(url="http://x", token_ids=50)
