"""--spec-trace 2 of the target: one line a step, with its own device times and the draft's. Events are a clock here."""

import logging
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.wire.spec import Planned
from target_worker.cuda.step_times import StepTimes


class Tick:
    """An event whose time is told by the test; over if it is before `now`."""

    at: ClassVar[float] = 0.0
    now: ClassVar[float] = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.ms = -1.0

    def record(self) -> None:
        self.ms = Tick.at

    def query(self) -> bool:
        return self.ms <= Tick.now

    def elapsed_time(self, end: "Tick") -> float:
        return end.ms - self.ms


def step(times: StepTimes, members: list[int], first_ms: float, ms: dict[str, float]) -> None:
    """A step whose sections take so long."""
    Tick.at = first_ms
    times.start(members)
    for name, long in ms.items():
        Tick.at += long
        times.mark(name)
    times.end()


def test_a_step_is_logged_once_it_is_over(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(torch.cuda, "Event", Tick)
    lengths = torch.tensor([0, 100, 30, 7], dtype=torch.int32)
    times = StepTimes(lengths)
    Tick.now = 0.0
    with caplog.at_level(logging.INFO):
        step(times, [1, 3], 1.0, {"verify": 2.0, "head": 0.5, "accept": 0.25})
        lengths += 4
        step(times, [2], 5.0, {"verify": 1.0, "head": 0.5, "accept": 0.125})
        assert caplog.messages == [], "the first is not over yet"
        Tick.now = 4.5
        times.draft = lambda: Planned(7, 0.0, 6, 900.0, 80.0, 20.0, 10.0)
        step(times, [2], 9.0, {"verify": 1.0, "head": 0.5, "accept": 0.125})
        Tick.now = 7.0
        step(times, [2], 12.0, {"verify": 1.0, "head": 0.5, "accept": 0.125})
    assert caplog.messages == [
        "[spec-phase-dev] n=2 ctx=107 fwd=900 head=80 select=20 verify=2000 accept=250 mem=10 target_head=500 wait=0",
        "[spec-phase-dev] n=1 ctx=34 fwd=900 head=80 select=20 verify=1000 accept=125 mem=10 target_head=500 wait=1250",
    ]
