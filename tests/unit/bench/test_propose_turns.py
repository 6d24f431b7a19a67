"""What bench.propose measures: turns of real workers, here of a tiny drafter and interpreted."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from draft_worker.config import ROUTES
from memsvc.wire.spec import Planned
from tests.bench import propose
from tests.bench.propose import COLUMNS, plot
from tests.bench.propose_geometry import GEOMETRIES
from tests.bench.propose_turns import WARM_UPS, Bench, Job, run_job
from tests.bench.target_turns import LEAD_US, HostClock
from tests.support.kernels import is_interpreted, mend_interpreter
from tests.support.plan_rig import HostSessions

JOB = Job(
    name="tiny-dflash2", geometry=GEOMETRIES["tiny-dflash2"], rows=3, context=20, concurrency=(1, 2), dtype="float32",
    repeats=2,
)  # fmt: skip


def test_all_routes_draft_the_same_tokens_for_every_request(tmp_path, device):
    with torch.inference_mode():
        bench = Bench(replace(JOB, device=device), tmp_path)
        if device == "cpu":
            bench.session_maker = HostSessions
        drafts = [bench.worker(route).tokens(2) for route in ROUTES]
    assert drafts[0] == drafts[1] == drafts[2]
    assert drafts[0][0] != drafts[0][1], "requests differ"
    assert all(0 < token < 512 for row in drafts[0] for token in row)


class WatchedClock(HostClock):
    """Writes down what it is asked; a turn is hidden if its spin is not shorter than needed."""

    def __init__(self, needed_us: float = 0.0) -> None:
        self.log: list[str] = []
        self.spins: list[float] = []
        self._needed_us = needed_us

    def mark(self) -> float:
        self.log.append("mark")
        return super().mark()

    def is_over(self, mark: float) -> bool:
        self.log.append("is_over")
        return self.spins[-1] < self._needed_us

    def spin(self, us: float) -> None:
        self.log.append("spin")
        self.spins.append(us)

    def wait(self) -> None:
        self.log.append("wait")


def host_bench(folder: Path, clock: WatchedClock) -> Bench:
    """Interpreted."""
    bench = Bench(replace(JOB, device="cpu"), folder)
    bench.session_maker, bench.clock = HostSessions, clock
    return bench


@pytest.mark.skipif(not is_interpreted(), reason="kernels of this process are compiled")
def test_sections_begin_on_a_stream_that_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = WatchedClock()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at = 0.0

        def record(self) -> None:
            clock.log.append("event")
            self.at = time.perf_counter()

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: "Event") -> float:
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    mend_interpreter()
    with torch.inference_mode():
        turns = host_bench(tmp_path, clock).worker("paged", spec_trace=2)
        clock.log.clear()
        row = turns.sections(1, 1)
    assert clock.log == ["spin", "mark", *["event"] * 6, "is_over", "mark", "wait"] * (WARM_UPS + 1)
    assert row.pop("sections_hidden") == "1/1"
    assert set(row) == {"mem_us", "fwd_us", "head_us", "select_us"}
    assert min(row.values()) > 0


@pytest.mark.parametrize(
    ("needed_us", "spins", "hidden"),
    [
        # Host times of 1000 us; the first of all is of a turn that is compiled.
        (0.0, [LEAD_US, 2 * 9000 + LEAD_US, LEAD_US + 2000, LEAD_US + 2000, LEAD_US + 2000], "2/2"),
        (10_000.0, [LEAD_US, 2 * 9000 + LEAD_US, LEAD_US + 2000, LEAD_US + 2000, LEAD_US + 2000], "0/2"),
        (1e9, [LEAD_US, 2 * 9000 + LEAD_US, LEAD_US + 2000, 0.0, 0.0], "0/2"),
    ],
)
def test_the_stream_is_busy_for_the_hosts_time_unless_that_hides_nothing(tmp_path, needed_us, spins, hidden):
    clock = WatchedClock(needed_us)
    host_us = [9000.0, *[1000.0] * 4]
    with torch.inference_mode():
        turns = host_bench(tmp_path, clock).worker("paged")
    turns._turn = lambda num_reqs: Planned(num_reqs, host_us[len(clock.spins) - 1])
    row = turns.measure(1, 2)
    assert clock.spins == spins
    assert (row["host_us"], row["hidden"]) == (1000.0, hidden)
    assert row["device_us"] > 0


ROWS: list[dict[str, Any]] = [
    dict.fromkeys(COLUMNS, 1.0) | {"geometry": "g", "route": route, "rows_per_request": size, "concurrency": num}
    for size in (8, 9) for route in ROUTES for num in (1, 4)
]  # fmt: skip


def test_the_plot_has_a_picture_for_each_block_size(tmp_path):
    pytest.importorskip("matplotlib")
    plot(ROWS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_an_earlier_result_is_drawn_without_measuring(tmp_path: Path):
    pytest.importorskip("matplotlib")
    (tmp_path / "rows.json").write_text(json.dumps({"rows": ROWS}), encoding="utf-8")
    propose.main(["--from", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_what_can_not_be_drawn_is_said_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for argv, why in (
        (["--plot", "plot.png"], "--plot needs matplotlib, which is not installed"),
        (["--from", str(tmp_path)], "--from needs --plot"),
        (["--from", str(tmp_path / "none.json"), "--plot", "plot.png"], "there is no file"),
    ):
        with pytest.raises(SystemExit):
            propose.main(argv)
        assert why in capsys.readouterr().err


@pytest.mark.gpu
def test_rows_have_all_columns_and_tokens_are_equal_in_float32():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rows = run_job(JOB, ROUTES)
    assert len(rows) == 6
    assert all(set(COLUMNS) <= set(row) for row in rows)
    for row in rows:
        assert row["tokens_equal"] == 1.0, row
        assert row["device_us"] > row["fwd_us"] > 0, row
        if row["route"] == "paged":
            assert (row["hidden"], row["sections_hidden"]) == ("2/2", "2/2"), row
