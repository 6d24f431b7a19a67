"""Every check of a soak holds for a run as it should be, and fails for what it is there to find."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.bench.soak_checks import Run, check_all, table
from tests.bench.soak_requests import Ended
from tests.bench.soak_watch import Reading, read_metrics, windows
from tests.load.answers import Check as Audit
from tests.load.call import Outcome

LOG = ["2026-01-01T00:00:00.000Z launch INFO start role=target pid=4\n", "launch WARNING weights are random\n"]


def answer(index: int, share: float = 0.4) -> Ended:
    """15 blocks, of whose 45 drafts about that share were accepted."""
    rng = Random(index)
    return Ended(
        index=index, max_tokens=30, outcome=Outcome.COMPLETED, finishes=["stop"], num_ends=1, output_tokens=20, steps=15,
        accepted=sum(rng.random() < share for _ in range(45)),
    )  # fmt: skip


def reading(at_s: float, **facts: Any) -> Reading:
    base = {
        "steps": 0, "blocks": 0, "accepted": 0, "tokens": 0, "running": 0, "held_pages": 0, "num_starts": 5, "down": (),
        "finished": {},
    }  # fmt: skip
    return Reading(at_s=at_s, **(base | facts))


def audit(**pages: int) -> Audit:
    return Audit(idle=True, leaked_bytes=0, pages={"target_kv": {"free": 7, "private": 0, "limbo": 0} | pages})


def good_run() -> Run:
    gone = Ended(index=40, max_tokens=9, outcome=Outcome.DISCONNECTED)
    return Run(
        wanted_steps=100,
        ended=[*(answer(index) for index in range(40)), gone],
        readings=[
            reading(0.0, finished={"stop": 2}),
            reading(1.0, steps=60, blocks=200, accepted=100, tokens=300, running=4, held_pages=9),
            reading(2.0, steps=110, blocks=400, accepted=250, tokens=650, running=3, held_pages=12),
            reading(2.5, steps=110, blocks=400, accepted=250, tokens=650, finished={"stop": 42, "abort": 1}),
        ],
        audit=audit(tree=3),
        audit_flushed=audit(),
        health=200,
    )


def failed(run: Run, log: list[str] = LOG, stopped: str = "") -> dict[str, str]:
    return {check.name: check.detail for check in check_all(run, log, stopped) if not check.is_ok}


def with_last(run: Run, **facts: Any) -> Run:
    return replace(run, readings=[*run.readings[:-1], replace(run.readings[-1], **facts)])


def with_answer(run: Run, **facts: Any) -> Run:
    return replace(run, ended=[replace(run.ended[0], **facts), *run.ended[1:]])


def test_a_good_run_passes_all_checks():
    run = good_run()
    checks = check_all(run, LOG, "")
    assert [check.name for check in checks if not check.is_ok] == []
    lines = table(windows(run.readings, 2), checks).splitlines()
    assert len(lines) == 1 + 2 + len(checks)
    assert lines[1].split() == ["60", "200", "1.500", "300.0", "16.667", "4", "9"]
    assert all(line.startswith("ok  ") for line in lines[3:])


def test_too_few_steps_are_told():
    assert failed(replace(good_run(), wanted_steps=111)) == {"verify steps": "110 of 111"}


def test_a_failed_request_is_told():
    found = failed(with_answer(good_run(), outcome=Outcome.FAILED, error="HTTP 500: oh"))
    assert set(found) == {"answers"}
    assert "request 0: HTTP 500: oh" in found["answers"]


def test_a_run_without_requests_is_none():
    assert {"answers", "acceptance"} <= set(failed(replace(good_run(), ended=[])))


@pytest.mark.parametrize(
    "facts",
    [
        {"finishes": ["stop", "length"]},
        {"finishes": []},
        {"finishes": ["abort"]},
        {"num_ends": 0},
        {"num_ends": 2},
        {"output_tokens": 31},
        {"output_tokens": 0},
        {"finishes": ["length"], "output_tokens": 29},
        {"outcome": Outcome.DISCONNECTED, "finishes": ["stop", "stop"]},
    ],
)
def test_an_answer_that_does_not_end_once_is_told(facts: dict[str, Any]):
    assert "request 0: " in failed(with_answer(good_run(), **facts))["ended once"]


@pytest.mark.parametrize(
    "finished",
    [{"stop": 41, "abort": 1}, {"stop": 44}, {"stop": 42, "abort": 2}, {"stop": 42, "error": 1}],
    ids=["one lost", "one too many", "ended twice", "an error"],
)
def test_ends_that_the_server_counts_otherwise_are_told(finished: dict[str, int]):
    assert set(failed(with_last(good_run(), finished=finished))) == {"server's count"}


def test_a_client_that_left_may_have_been_answered():
    assert failed(with_last(good_run(), finished={"stop": 43})) == {}


def test_acceptance_that_falls_is_told():
    run = good_run()
    worse = [answer(one.index, 0.4 if one.index < 20 else 0.2) for one in run.ended[:40]]
    found = failed(replace(run, ended=[*worse, run.ended[40]]))
    assert set(found) == {"acceptance"}
    assert "standard errors" in found["acceptance"]


def test_acceptance_of_too_few_answers_is_told():
    run = good_run()
    few = replace(run, ended=run.ended[:18])
    assert "acceptance" in failed(with_last(few, finished={"stop": 20}))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"audit": None}, "no audit at the end"),
        ({"audit": audit(private=2)}, "target_kv pages {'private': 2} at the end"),
        ({"audit": Audit(idle=False, leaked_bytes=0)}, "not idle at the end"),
        ({"audit": Audit(idle=True, leaked_bytes=64)}, "64 bytes leaked at the end"),
        ({"audit": Audit(idle=True, leaked_bytes=0, problems=["page 4 has two owners"])}, "page 4 has two owners"),
        ({"audit_flushed": audit(tree=1)}, "target_kv pages {'tree': 1} after the flush"),
        ({"audit_flushed": None}, "no audit after the flush"),
    ],
)
def test_a_pool_that_is_not_as_it_was_is_told(facts: dict[str, Any], said: str):
    found = failed(replace(good_run(), **facts))
    assert set(found) == {"pool"}
    assert said in found["pool"]


def test_a_server_that_is_down_restarted_or_ends_badly_is_told():
    assert failed(replace(good_run(), health=503)) == {"alive": "/health answered 503"}
    assert failed(replace(good_run(), health=0)) == {"alive": "/health answered nothing"}
    assert failed(with_last(good_run(), num_starts=6)) == {"alive": "1 processes were started anew"}
    assert failed(with_last(good_run(), down=("draft",))) == {"alive": "down: draft"}
    assert failed(good_run(), stopped="exit status 1:") == {"alive": "exit status 1:"}


@pytest.mark.parametrize("line", ["t target ERROR step failed\n", "Traceback (most recent call last):\n"])
def test_an_error_in_the_log_is_told(line: str):
    assert failed(good_run(), log=[*LOG, line]) == {"log": f"3 lines, 1 errors, 1 warnings; {line.strip()}"}


def test_metrics_are_read_by_name_and_label():
    text = """
# TYPE memsvc_spec_width_steps_total counter
memsvc_spec_width_steps_total{drafts="0",model_name="m"} 7.0
memsvc_spec_width_steps_total{drafts="3",model_name="m"} 40.0
memsvc_spec_width_steps_total{drafts="7",model_name="m"} 2.0
memsvc_spec_steps_total{model_name="m"} 300.0
vllm:spec_decode_num_drafts_total{model_name="m",engine="0"} 300.0
memsvc_spec_accepted_tokens_total{model_name="m"} 450.0
memsvc_generation_tokens_total{model_name="m"} 1e+03
memsvc_requests_running{model_name="m"} 4.0
memsvc_pages{kind="target_kv",model_name="m",state="private"} 5.0
memsvc_pages{kind="draft_kv",model_name="m",state="limbo"} 1.0
memsvc_pages{kind="draft_kv",model_name="m",state="tree"} 90.0
memsvc_process_starts{model_name="m",role="target"} 1.0
memsvc_process_starts{model_name="m",role="draft"} 2.0
memsvc_process_up{model_name="m",role="target"} 1.0
memsvc_process_up{model_name="m",role="draft"} 0.0
memsvc_requests_finished_total{finished_reason="stop",model_name="m"} 12.0
"""
    assert read_metrics(text, 1.5) == Reading(
        at_s=1.5, steps=42, blocks=300, accepted=450, tokens=1000, running=4, held_pages=6, num_starts=3, down=("draft",),
        finished={"stop": 12},
    )  # fmt: skip


def test_windows_have_equally_many_steps_where_readings_allow_it():
    readings = [reading(0.1 * i, steps=10 * i, blocks=20 * i, accepted=10 * i, tokens=30 * i) for i in range(101)]
    parts = windows(readings, 10)
    assert [part.steps for part in parts] == [100] * 10
    assert {part.accept_length for part in parts} == {1.5}
    assert [part.steps for part in windows([readings[0], readings[55], readings[100]], 10)] == [550, 450]
    assert windows(readings[:1], 10) == []
    assert windows([readings[0], readings[0]], 10) == []
