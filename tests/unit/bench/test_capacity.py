"""What the capacity bench makes of answers, its search, and one run against a tiny server on the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench import capacity
from tests.bench.capacity_search import Trial, asks_of, most_at_once, planned, search
from tests.load.call import Call, Outcome


def answered(first: float, last: float, outcome: Outcome = Outcome.COMPLETED) -> Call:
    return Call(
        index=0, prompt=[1], stream=True, hang_up_point=None, outcome=outcome, start=0.0, first=first, last=last
    )


def test_who_waits_for_anothers_end_is_not_live_beside_it():
    calls = [answered(1.0, 5.0), answered(2.0, 6.0), answered(5.0, 9.0)]
    assert most_at_once(calls) == 2
    assert most_at_once([*calls, answered(4.9, 5.1)]) == 3
    assert most_at_once([*calls, answered(3.0, 8.0, Outcome.FAILED)]) == 2
    assert most_at_once([]) == 0


@pytest.mark.parametrize("changes", [{"live": 6}, {"retracted": 1}, {"failed": 1}])
def test_a_trial_fits_only_if_all_ran_and_none_was_taken_back(changes: dict[str, int]):
    good = {"num": 7, "live": 7, "retracted": 0, "failed": 0}
    assert Trial(**good).fits
    assert not Trial(**good | changes).fits


class Server:
    """Room for so many; others wait for their end, or one is taken back."""

    def __init__(self, room: int, *, retracts: bool) -> None:
        self.room = room
        self.retracts = retracts
        self.asked: list[int] = []

    def attempt(self, num: int) -> Trial:
        self.asked.append(num)
        over = max(0, num - self.room)
        if self.retracts:
            return Trial(num=num, live=num, retracted=min(1, over), failed=0)
        return Trial(num=num, live=num - over, retracted=0, failed=0)


@pytest.mark.parametrize("retracts", [False, True])
@pytest.mark.parametrize("room", [1, 50, 117, 119, 120, 126, 191])
def test_the_search_finds_the_largest_number(room: int, retracts: bool):
    server = Server(room, retracts=retracts)
    found = search(server.attempt, 120, 192, 20)
    assert (found.num, found.is_most) == (room, True)
    assert len(set(server.asked)) == len(server.asked) == len(found.trials)
    if abs(room - 120) <= 3:
        assert len(server.asked) <= 5


def test_a_search_that_ends_early_says_at_least():
    found = search(Server(117, retracts=True).attempt, 60, 192, 3)
    assert (found.num, found.is_most) == (62, False)
    assert search(Server(500, retracts=False).attempt, 190, 192, 9).is_most is False, "slots were the limit"
    assert search(Server(0, retracts=False).attempt, 4, 192, 9).num == 0


def test_requests_reach_their_length_together():
    asks = asks_of(120, 4096, 256, tokens_a_step=4.0, budget=8192)
    assert asks[-1].prompt == 4096 - 256
    assert {ask.prompt + ask.answer for ask in asks} == {4096}
    # Behind the first come 119 prompts of 3840 tokens, 8192 a step.
    assert 4096 - 256 - asks[0].prompt == pytest.approx(4 * 119 * 3840 / 8192, abs=1)
    with pytest.raises(ValueError, match="before the last begins"):
        asks_of(120, 4096, 256, tokens_a_step=4.0, budget=300)


def test_the_planned_number_is_that_of_the_plans_lines():
    kind = {"name": "target_kv", "page_bytes": 1000, "stride_bytes": 1000, "pages_per_frame": 3,
            "tokens_per_page": 16, "pages_per_req": 0, "window": 0}  # fmt: skip
    state = kind | {"name": "state", "pages_per_frame": 2, "tokens_per_page": 0, "pages_per_req": 4}
    plan = {"frame_bytes": 3000, "exchange_bytes": 6001, "shared_bytes": 2999, "num_frames": 105, "arena_bytes": 315000,
            "kinds": [kind, state], "slack_tokens": 24}  # fmt: skip
    # 100 frames: 160 slots are ten pages, of which three make a frame, and four of states are two frames.
    assert planned(plan, 136) == 18


class NoServer:
    """As far as the bench looks at a server. Each load takes one back and turns two away."""

    url, start_s = "http://nowhere", 2.0

    def __init__(self, flags: list[str], ready_s: float, log: Path | None) -> None:
        self.flags, self.loads = flags, 0
        self.lines = ["launch INFO target: attention max_prefill_tokens=100\n"]

    def __enter__(self) -> "NoServer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get(self, path: str) -> dict[str, Any]:
        return {"memory_plan": {"device": {"total_bytes": 1000}, "arena_bytes": 5, "lines": []}}

    def metrics(self) -> list[Any]:
        return []


def test_what_goes_wrong_in_a_rung_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    totals = {"retracted": 0, "refused": 0}
    loads: list[int] = []

    def load_at(url: str, ladder: Any, c: int, *, max_tokens: int, requests: int) -> dict[str, Any]:
        loads.append(c)
        totals["retracted"] += 1
        totals["refused"] += 2
        return {"output_tok_s": 10.0 * c, "completed": requests - 2, "failed": 2, "ttft_ms_p50": 1.0,
                "tpot_ms_p50": 2.0, "accept_length": 4.0, "errors": [{"kind": "HTTP 429"}]}  # fmt: skip

    monkeypatch.setattr(capacity, "Served", NoServer)
    monkeypatch.setattr(capacity, "server_flags", lambda ladder, folder, args: args.flags)
    monkeypatch.setattr(capacity, "planned", lambda plan, tokens: 9)
    monkeypatch.setattr(capacity, "counted", lambda server: dict(totals))
    monkeypatch.setattr(capacity, "load_at", load_at)
    monkeypatch.setattr(
        capacity, "find_most", lambda server, args, first: search(Server(7, retracts=False).attempt, first, 192, 9)
    )
    file = tmp_path / "capacity.json"
    assert capacity.main(["--rungs", "64,96", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["requests_4k"], found["requests_4k_planned"], found["peer_bytes"]) == (7, 9, 850)
    assert loads == [96, 64, 96], "the first is not counted"
    for c in (64, 96):
        row = found[f"c{c}"]
        assert (row["output_tok_s"], row["completed"], row["failed"]) == (10.0 * c, 2 * c - 2, 2)
        assert (row["retracted"], row["refused"]) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", ["tiny", "tiny-hybrid"])
def test_a_tiny_server_runs_as_many_as_planned_or_few_less(geometry: str, tmp_path: Path):
    file = tmp_path / "capacity.json"
    argv = ["--geometry", geometry, "--device", "cpu", "--tokens", "256", "--tail", "128", "--accept-length", "2.5"]
    flags = ["--", "--threads", "1", "--dtype", "float32", "--mem-bytes", "6M"]
    assert capacity.main([*argv, "--slots", "40", "--trials", "9", "--rungs", "3", "--json", str(file), *flags]) == 0
    found = json.loads(file.read_text())
    assert found["is_most"]
    # The plan gives each its slots for steps in flight, two pages beside sixteen, and not all need them at one time.
    assert 0.85 * found["requests_4k_planned"] <= found["requests_4k"] <= 1.2 * found["requests_4k_planned"]
    assert (found["c3"]["completed"], found["c3"]["failed"]) == (6, 0)
    assert found["peer_bytes"] is None
