"""What the soak sends and reads, and one soak of a tiny server on the CPU."""

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bench import soak
from tests.bench.soak_requests import Asked, Ended, Mix, ask, plan
from tests.load.call import Outcome
from tests.load.http1 import parse_address
from tests.support.fake_openai import FakeOpenAI

MIX = Mix(seed=3, raw=True, prompt_words=50, max_tokens=40, cancel=0.2)
FLAGS = ["--threads", "1", "--dtype", "float32", "--mem-bytes", "64M"]


def ended_of(fake: FakeOpenAI, *, stream: bool = True, hang_up: float | None = None) -> Ended:
    body = {"messages": [], "max_tokens": 8, "stream": stream}
    asked = Asked(index=5, path="/v1/chat/completions", body=body, hang_up=hang_up)

    async def go() -> Ended:
        async with fake.serve() as url:
            return await ask(asked, parse_address(url), 0.3, 5.0)

    return asyncio.run(go())


def test_requests_follow_from_seed_and_number_and_are_unlike_each_other():
    made = [plan(MIX, index) for index in range(300)]
    assert made == [plan(MIX, index) for index in range(300)]
    assert made != [plan(Mix(seed=4, raw=True, prompt_words=50, max_tokens=40, cancel=0.2), i) for i in range(300)]
    bodies = [asked.body for asked in made]
    assert len({body["prompt"] for body in bodies}) > 200
    assert {body["max_tokens"] for body in bodies} == set(range(1, 41))
    assert sum(body["temperature"] > 0 for body in bodies) > 240
    for name in ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop"):
        assert 20 < sum(name in body for body in bodies) < 80
    assert 30 < sum(asked.hang_up is not None for asked in made) < 90
    assert 180 < sum(body["stream"] for body in bodies) < 270
    chat = plan(Mix(seed=3, raw=False, prompt_words=50, max_tokens=40, cancel=0.2), 0)
    assert chat.path == "/v1/chat/completions"
    assert chat.body["messages"] == [{"role": "user", "content": bodies[0]["prompt"]}]


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_read_to_its_end(stream: bool):
    ended = ended_of(FakeOpenAI(), stream=stream)
    assert (ended.outcome, ended.error) == (Outcome.COMPLETED, "")
    assert (ended.finishes, ended.num_ends, ended.output_tokens) == (["stop"], 1, 6)
    assert (ended.steps, ended.accepted) == (4, 6)
    assert ended.seconds > 0


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        (FakeOpenAI(status=503), "HTTP 503"),
        (FakeOpenAI(error_after=1), "error in the answer"),
        (FakeOpenAI(drop_after=1), "connection closed"),
    ],
)
def test_what_goes_wrong_is_a_failure(fake: FakeOpenAI, said: str):
    ended = ended_of(fake)
    assert ended.outcome is Outcome.FAILED
    assert said in ended.error


def test_a_client_that_leaves_has_not_failed():
    fake = FakeOpenAI(hang=True)
    ended = ended_of(fake, hang_up=0.2)
    assert (ended.outcome, ended.error, ended.finishes) == (Outcome.DISCONNECTED, "", [])
    assert fake.num_hang_ups == 1


def test_a_bad_number_is_named():
    with pytest.raises(ValueError, match="--steps is 0"):
        soak.SoakOptions(steps=0)


def soaked(folder: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    file = folder / "soak.json"
    options = ["--max-tokens", "24", "--prompt-words", "20", "--windows", "3", "--json", str(file)]
    status = soak.main([*argv, *options, "--", *FLAGS])
    return status, json.loads(file.read_text())


@pytest.mark.slow
def test_a_tiny_server_is_soaked_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = tmp_path / "server.log"
    status, found = soaked(tmp_path, "--steps", "120", "--concurrency", "4", "--log", str(log))
    out = capsys.readouterr().out
    assert status == 0, out
    assert found["is_ok"]
    assert len(found["checks"]) == out.count("ok  ") == 8
    assert 2 <= len(found["windows"]) <= 3
    assert sum(window["steps"] for window in found["windows"]) >= 120
    assert "weights are random" in log.read_text()


@pytest.mark.slow
def test_a_process_that_dies_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def plan_and_kill(mix: Mix, index: int) -> Asked:
        if index == 10:
            (drafter,) = [c for c in psutil.Process().children(recursive=True) if "draft_worker" in c.cmdline()]
            drafter.kill()
        return plan(mix, index)

    monkeypatch.setattr(soak, "plan", plan_and_kill)
    status, found = soaked(tmp_path, "--steps", "100000", "--concurrency", "2", "--longest-s", "8")
    out = capsys.readouterr().out
    assert status == 1
    failed = {check["name"]: check["detail"] for check in found["checks"] if not check["is_ok"]}
    assert {"alive", "verify steps"} <= set(failed), out
    assert "1 processes were started anew" in failed["alive"]
