"""Arithmetic of the pool benchmark: the search for a ratio, medians, goals and the table."""

import math
from typing import Any

import pytest

from tests.bench.pool_facts import geometry_waste, requests_at_once, runs_to_the_end
from tests.bench.pool_sweep import FACTOR, Bench, Case, climb, guess_ratio, medians
from tests.bench.pool_table import common_ratios, goal, ratios, table


def test_the_climb_ends_at_the_best_ratio_on_its_ladder():
    assert climb(lambda r: -abs(math.log(r / 4.0)), 1.0) == pytest.approx(4.0)
    assert climb(lambda r: -abs(math.log(r / 0.25)), 1.0) == pytest.approx(0.25)
    assert climb(lambda r: 1.0, 3.0) == 3.0


def test_the_best_ratio_is_no_worse_than_its_neighbours():
    bench, case = Bench(), Case(load="short", gib=4, seed=1, steps=30)
    best = bench.best_ratio("static-ring", case)
    value = bench.run("static-ring", case, best)["mean_running"]
    for near in (best * FACTOR**0.5, best / FACTOR**0.5):
        assert bench.run("static-ring", case, near)["mean_running"] <= value
    assert best / 4 < guess_ratio("static-ring", bench.jobs(case)) < best * 4


def test_all_modes_of_a_case_get_the_same_jobs():
    bench, case = Bench(), Case(load="mixed", gib=4, seed=1, steps=20)
    rows = [bench.run(mode, case, 1.0) for mode in ("unified", "static-ring", "padded")]
    assert len({row["arrived"] for row in rows}) == 1
    assert bench.jobs(case) is bench.jobs(Case(load="mixed", gib=4, seed=1, steps=20))


def test_a_split_that_holds_nobody_is_a_row_with_none_running():
    row = Bench().run("static-scratch", Case(load="short", gib=4, seed=1, steps=10), 0.01)
    assert row["mean_running"] == 0
    assert "impossible" in row


def row(mode: str, running: float, **more: Any) -> dict[str, Any]:
    return {"mode": mode, "ratio": None, "gib": 40, "load": "mixed", "seed": 1, "mean_running": running, **more}


def test_medians_are_taken_number_by_number():
    waste = [{"holes": {"ring": value}} for value in (3.0, 1.0, 2.0)]
    rows = [row("padded", value, waste=w) for value, w in zip((1.0, 5.0, 2.0), waste, strict=True)]
    found = medians(rows)
    assert (found["mean_running"], found["seeds"], found["gib"]) == (2.0, 3, 40)
    assert found["waste"] == {"holes": {"ring": 2.0}}


def test_the_one_pool_is_compared_with_each_other_mode_of_its_load_and_size():
    rows = [row("unified", 30.0), row("padded", 10.0), row("static-ring", 20.0), row("unified", 9.0) | {"gib": 20}]
    assert ratios(rows) == {("mixed", 40): {"padded": 3.0, "static-ring": 1.5}}


def test_the_ratio_for_all_loads_weighs_loads_alike():
    def at(ratio: float, load: str, running: float) -> dict[str, Any]:
        return row("static-ring", running) | {"ratio": ratio, "load": load}

    rows = [at(1.0, "short", 100.0), at(1.0, "long", 2.0), at(0.25, "short", 50.0), at(0.25, "long", 10.0)]
    assert common_ratios(rows)["static-ring"]["ratio"] == 0.25


def test_goals_hold_for_a_load_and_for_its_synthetic_likeness():
    assert goal("static-scratch", "mooncake") == goal("padded", "mooncake-like") == 2.4
    assert goal("static-ring", "shifting") == 1.1
    assert goal("padded-ring", "azure") == 0.97
    assert goal("padded", "short") == 0.0


def test_the_table_marks_what_is_below_its_goal():
    rows = [row("unified", 29.0), row("padded", 10.0), row("static-ring", 20.0) | {"ratio": 0.5}]
    step: dict[str, Any] = {"median": 90.0, "p99": 300.0, "compiled": True}
    fits = {"fits": True, "answered": 254, "of": 256}
    report = {
        "rows": rows,
        "single_ratio_for_all_loads": {},
        "geometry_waste": {"by_kind": {"state": 0.01}, "request_4k": 0.02},
        "requests_4k_60gib": 124,
        "requests_4k_60gib_warm": 120,
        "requests_4k_60gib_padded": 35,
        "requests_4k_30gib": 62,
        "run_60_of_4k_in_30gib": fits,
        "run_32_of_4k_in_16gib": fits | {"fits": False},
        "step32": step,
    }
    text = table(report)
    assert "10.0 x2.90*" in text
    assert "20.0 (0.5) x1.45" in text
    assert "x1.45*" not in text
    assert "60 of them in 30 GiB: fit; 32 in 16 GiB: do not fit" in text


def test_what_fits_at_once_follows_from_bytes():
    assert requests_at_once(4) == 8
    assert runs_to_the_end(4, 8)["fits"]
    assert not runs_to_the_end(4, 9)["fits"]


def test_geometry_waste_is_of_frames_below_four_megabytes():
    found = geometry_waste()
    assert found["frame_bytes"] <= 4 << 20  # type: ignore[operator]
    assert found["request_4k"] < 0.025  # type: ignore[operator]
