"""What the bench of prefill budgets makes of answers and of a server's histogram, and one run on the CPU."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench import prefill_budget
from tests.bench.prefill_budget import asks_of, bound_ms
from tests.load.call import Call, Outcome
from tests.load.run import RunResult

INFINITE = float("inf")


def test_a_bound_holds_the_share_of_what_came_in_between():
    before = {0.01: 100.0, 0.1: 100.0, INFINITE: 100.0}
    after = {0.01: 150.0, 0.1: 199.0, INFINITE: 200.0}
    assert bound_ms(before, after, 0.5) == 10.0
    assert bound_ms(before, after, 0.99) == 100.0
    assert bound_ms(before, after, 1.0) is None, "one is past all bounds"
    assert bound_ms(after, after, 0.5) is None
    assert bound_ms({}, {}, 0.5) is None


def test_every_budget_has_the_same_prompts():
    asks = asks_of(500, (256, 4096), 32)
    assert asks == asks_of(500, (256, 4096), 32)
    lengths = [ask.prompt for ask in asks]
    assert min(lengths) < 400
    assert max(lengths) > 3900
    assert {ask.answer for ask in asks} == {32}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests of each load: each gets its first token after as many seconds as its number, one more every 0.1 s."""
    sent: list[int] = []

    def run_asks(asks: Any, options: Any) -> RunResult:
        sent.append(len(asks))
        calls = [
            Call(
                index=i, prompt=[1] * ask.prompt, stream=True, hang_up_point=None, outcome=Outcome.COMPLETED,
                start=0.0, first=1.0 + i, last=1.0 + i + 0.1 * (ask.answer - 1), num_chunks=ask.answer,
            )
            for i, ask in enumerate(asks)
        ]  # fmt: skip
        return RunResult(
            calls=calls, wall_s=2.0, client_cpu_s=0.1, model="m", server_info=None, counters_before=None,
            counters_after=None, check=None,
        )  # fmt: skip

    monkeypatch.setattr(prefill_budget, "run_asks", run_asks)
    return sent


def test_the_first_burst_counts_for_throughput_alone(loads: list[int]):
    server: Any = SimpleNamespace(url="http://nowhere", metrics=list)
    args: Any = SimpleNamespace(geometry="tiny", c=3)
    row = prefill_budget.row_of(server, 512, asks_of(6, (4, 9), 11), args)
    assert loads == [3, 6], "the first is not counted"
    assert row == {
        "budget": 512, "c": 3, "ttft_ms_p50": 5000.0, "ttft_ms_p99": 5980.0, "tpot_ms_p50": pytest.approx(100.0),
        "tpot_ms_p99": pytest.approx(100.0), "gap_ms_p99": None, "output_tok_s": 33.0,
    }  # fmt: skip


def test_what_can_not_be_measured_is_said(capsys: pytest.CaptureFixture[str]):
    for argv, why in (
        (["--c", "4", "--requests", "4"], "--requests must be more than --c"),
        (["--prompts", "9,4"], "--prompts takes two lengths"),
        (["--prompts", "9"], "--prompts takes two lengths"),
    ):
        with pytest.raises(SystemExit):
            prefill_budget.main(argv)
        assert why in capsys.readouterr().err


@pytest.mark.slow
def test_two_budgets_are_measured_on_the_cpu(tmp_path: Path):
    file = tmp_path / "budgets.json"
    argv = ["--geometry", "tiny", "--device", "cpu", "--budgets", "16,256", "--c", "2", "--requests", "6"]
    argv += ["--prompts", "20,90", "--answer", "12", "--accept-length", "2.5", "--json", str(file)]
    assert prefill_budget.main([*argv, "--", "--threads", "1", "--dtype", "float32", "--mem-bytes", "64M"]) == 0
    found = json.loads(file.read_text())
    assert [(row["budget"], row["c"]) for row in found["rows"]] == [(16, 2), (256, 2)]
    for row in found["rows"]:
        assert min(value for value in row.values()) > 0
        assert row["ttft_ms_p99"] >= row["ttft_ms_p50"]
