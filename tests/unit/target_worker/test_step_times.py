"""--spec-trace 2 of the target: one line a step, with its own device times and the draft's. Events are a clock here."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.wire.spec import Planned
from memsvc.wire.text import Sampling
from target_worker.cuda.step_times import StepTimes
from tests.support.device_target import DeviceTarget
from tests.support.kernels import is_interpreted, mend_interpreter
from tests.support.tiny_target import make_target


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


BLOCKS = {"verify": 1.0, "head": 0.5, "accept": 0.125}


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> StepTimes:
    """Of four slots."""
    monkeypatch.setattr(torch.cuda, "Event", Tick)
    Tick.now = 0.0
    return StepTimes(torch.tensor([0, 100, 30, 7], dtype=torch.int32))


def test_a_step_is_logged_once_it_is_over(times: StepTimes, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        step(times, [1, 3], 1.0, {"verify": 2.0, "head": 0.5, "accept": 0.25, "prompts": 0.0})
        times._lengths += 4
        step(times, [2], 5.0, BLOCKS | {"prompts": 0.0})
        assert caplog.messages == [], "the first is not over yet"
        Tick.now = 4.5
        times.draft = lambda: Planned(7, 0.0, 6, 900.0, 80.0, 20.0, 10.0)
        step(times, [2], 9.0, BLOCKS)
        Tick.now = 7.0
        step(times, [2], 12.0, BLOCKS)
    assert caplog.messages == [
        "[spec-phase-dev] n=2 ctx=107 fwd=900 head=80 select=20 verify=2000 accept=250 mem=10 target_head=500"
        " prompts=0 wait=0",
        "[spec-phase-dev] n=1 ctx=34 fwd=900 head=80 select=20 verify=1000 accept=125 mem=10 target_head=500"
        " prompts=0 wait=1250",
    ]


def test_prompts_count_apart_from_blocks_and_are_no_wait(times: StepTimes, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        step(times, [], 1.0, {"prompts": 30.0})
        step(times, [2], 32.0, BLOCKS | {"prompts": 7.0})
        step(times, [2], 42.0, BLOCKS | {"prompts": 0.0})
        Tick.now = 50.0
        step(times, [], 60.0, {"prompts": 1.0})
    assert caplog.messages == [
        "[spec-phase-dev] n=0 ctx=0 fwd=0 head=0 select=0 verify=0 accept=0 mem=0 target_head=0 prompts=30000 wait=0",
        "[spec-phase-dev] n=1 ctx=30 fwd=0 head=0 select=0 verify=1000 accept=125 mem=0 target_head=500"
        " prompts=7000 wait=1000",
        "[spec-phase-dev] n=1 ctx=30 fwd=0 head=0 select=0 verify=1000 accept=125 mem=0 target_head=500"
        " prompts=0 wait=1375",
    ]


class Marked(StepTimes):
    """Writes down what it is told, a list a step."""

    def __init__(self, lengths: torch.Tensor) -> None:
        super().__init__(lengths)
        self.steps: list[list[object]] = []

    def begin(self, number: int, members: Sequence[int]) -> None:
        self.steps.append([number, list(members)])
        super().begin(number, members)

    def mark(self, section: str) -> None:
        self.steps[-1].append(section)
        super().mark(section)


@pytest.mark.skipif(not is_interpreted(), reason="kernels of this process are compiled")
@pytest.mark.parametrize("prompt_buckets", [(), (4,)], ids=["eager prompts", "prompts in a bucket"])
def test_every_step_ends_with_one_section_of_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt_buckets: tuple[int, ...]
):
    monkeypatch.setattr(torch.cuda, "Event", Tick)
    mend_interpreter()
    make_target(
        tmp_path, "Qwen3", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        hidden_size=32, intermediate_size=48,
    )  # fmt: skip
    target = DeviceTarget(tmp_path, "cpu", block_size=2, prompt_buckets=prompt_buckets)
    times = target.work.times = Marked(target.slots.length)
    greedy = Sampling(temperature=0.0, seed=1, max_tokens=40, ignore_eos=True)
    first, second = (target.open(rid, [5, 9, 11], 12, greedy) for rid in (1, 2))
    target.step([], {first: 3})
    target.step([first], {second: 3})
    target.step([first, second])
    blocks = ["verify", "head", "accept"]
    assert times.steps == [
        [1, [], "", "prompts", ""],
        [2, [first.row], "", *blocks, "prompts", ""],
        [3, [first.row, second.row], "", *blocks, "prompts", ""],
    ]
    # Never begun anew, and none is left open.
    assert times._open is None
