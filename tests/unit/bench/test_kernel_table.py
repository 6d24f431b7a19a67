"""Tables of kernels: from a profiler's trace to a step's launches and times, and to lines."""

import pytest
import torch

from tests.bench.kernel_table import (
    NAME_WIDTH,
    Event,
    Recording,
    busy_us,
    cut,
    events_of,
    recorded,
    shortened,
    shown,
    summarise,
)

GEMM = "nvjet_tst_128x64_64x8_1x2_h_bz_coopA_NNT"


def traced(name: str, ts: float, dur: float, cat: str = "kernel", **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def test_events_are_the_devices_work_in_order():
    trace = {
        "schemaVersion": 1,
        "traceEvents": [
            traced("cudaGraphLaunch", 0.0, 9.0, "cuda_runtime"),
            traced("_norm", 1700000000020.5, 2.25, grid=[9, 1, 1]),
            traced("Memcpy DtoD (Device -> Device)", 1700000000010.0, 1.5, "gpu_memcpy", bytes=64),
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        ],
    }
    assert events_of(trace) == [
        Event("Memcpy DtoD (Device -> Device)", (), 1700000000010.0, 1.5),
        Event("_norm", (9, 1, 1), 1700000000020.5, 2.25),
    ]
    assert events_of({}) == []


def test_a_trace_is_cut_at_its_markers():
    names = ["before", "at::cuda::(anonymous namespace)::spin_kernel(long)", "a", "b", "spin_kernel(long)", "between"]
    names += ["spin_kernel(long)", "spin_kernel(long)", "after"]
    parts = cut([Event(name, (), float(i), 1.0) for i, name in enumerate(names)], "spin_kernel")
    assert [[event.name for event in part] for part in parts] == [["a", "b"], ["between"], [], ["after"]]


def test_steps_that_lost_a_marker_are_not_told_apart():
    recording = Recording("cuda")
    recording._num_added = 1
    with pytest.raises(RuntimeError, match="saw 1 of 2 markers"):
        recording.end({"traceEvents": [traced("spin_kernel", 0.0, 1.0), traced("a", 1.0, 1.0)]})


def test_a_step_is_summed_up_by_kernel_and_grid():
    events = [
        Event(GEMM, (132, 1, 1), 0.0, 10.0), Event("_norm", (9, 1, 1), 9.0, 2.0), Event("_norm", (18, 1, 1), 12.0, 1.0),
        Event(GEMM, (132, 1, 1), 20.0, 12.0), Event("_norm", (9, 1, 1), 40.0, 4.0), Event("_gated", (9, 12, 1), 50.0, 1.0),
    ]  # fmt: skip
    table = summarise(events, num_steps=2, device_us=20.0, top=2)
    assert (table["kernels_us"], table["gap_us"], table["overlap_us"], table["launches"]) == (15.0, 5.0, 0.5, 3.0)
    assert table["top"] == [
        {"name": GEMM, "grid": "132x1x1", "launches": 1.0, "us": 11.0, "us_each": 11.0},
        {"name": "_norm", "grid": "9x1x1", "launches": 1.0, "us": 3.0, "us_each": 3.0},
        {"name": "(2 others)", "grid": "", "launches": 1.0, "us": 1.0, "us_each": 1.0},
    ]
    assert sum(line["us"] for line in table["top"]) == table["kernels_us"]
    assert len(summarise(events, 2, 20.0)["top"]) == 4, "nothing is left over"
    assert busy_us(events) == 29.0


def test_lines_stand_below_each_other():
    events = [Event("x" * 200, (1, 2, 3), 0.0, 12345.6), Event("Memset (Device)", (), 20000.0, 0.5)]
    lines = shown(summarise(events, 1, 20000.0))
    assert lines[0] == "device 20000.0 us = kernels 12346.1 + gap 7653.9 (overlap 0.0, 2.0 launches a step)"
    assert len({len(line) for line in lines[1:]}) == 1
    assert lines[2].startswith("x" * (NAME_WIDTH - 3) + "... ")
    assert lines[3].split() == ["Memset", "(Device)", "1", "0.5", "0.50"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (GEMM, GEMM),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
         "(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)",
         "vectorized_elementwise_kernel<4, FillFunctor<float>, std:..."),
        ("void (anonymous namespace)::indexSelectSmallIndex<float, long>(at::TensorInfo<float>, int)",
         "indexSelectSmallIndex<float, long>"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("", ""),
    ],
)  # fmt: skip
def test_names_are_shortened(name: str, short: str):
    assert shortened(name) == short
    assert len(short) <= NAME_WIDTH


def test_steps_are_recorded_one_kind_after_another():
    x = torch.ones(4)
    with recorded("cpu") as recording:
        adds = recording.add(lambda: x + x, 3)
        torch.sub(x, x)
        sines = recording.add(lambda: x.sin().sin(), 2)
    assert [event.name for event in recording.parts[adds]] == ["aten::add"] * 3
    table = summarise(recording.parts[sines], 2, 1e6)
    assert [(line["name"], line["launches"]) for line in table["top"]] == [("aten::sin", 2.0)]
