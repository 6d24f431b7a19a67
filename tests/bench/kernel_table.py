"""Which kernels the device time of a step goes to: torch.profiler's trace, summed up by kernel and size of grid.

The profiler runs once for all steps, and what it saw is cut at marker kernels: a second run, or one before graphs are
captured, may see nothing on CUDA 13.
"""

import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Table = dict[str, Any]

DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of a trace's events that take device time."""
_SEEN = {"cuda": (ProfilerActivity.CUDA, DEVICE_WORK), "cpu": (ProfilerActivity.CPU, frozenset({"cpu_op"}))}
"""What is recorded on a device. On the CPU that is what torch computes there, for tests of everything around it."""
_MARKERS = {"cuda": "spin_kernel", "cpu": "aten::special_erfcx"}
"""Part of the name of what no step launches."""
_MARKER_CYCLES = 2000
TOP = 14
NAME_WIDTH = 60
_OPEN, _CLOSE = "<(", ">)"


@dataclass(frozen=True, slots=True)
class Event:
    """One launch on the device."""

    name: str
    grid: tuple[int, ...]
    """Empty for copies."""
    start_us: float
    us: float


class Recording:
    """Steps that are seen by the profiler, one kind after another. What they launched is known when it has ended."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._num_added = 0
        self._one = torch.ones(1)
        self.parts: list[list[Event]] = []
        """By the numbers that `add` gave."""

    def add(self, step: Callable[[], object], num_steps: int) -> int:
        """Run so many steps on the current stream. Their number in parts."""
        self._num_added += 1
        self._mark()
        for _ in range(num_steps):
            step()
        self._mark()
        return self._num_added - 1

    def _mark(self) -> None:
        if self._device == "cuda":
            torch.cuda._sleep(_MARKER_CYCLES)
        else:
            torch.special.erfcx(self._one)

    def end(self, trace: dict[str, Any]) -> None:
        """Cut the trace. Raises RuntimeError if it lacks markers: nobody could say whose its events are."""
        events = events_of(trace, _SEEN[self._device][1])
        found = cut(events, _MARKERS[self._device])
        if len(found) != 2 * self._num_added:
            raise RuntimeError(
                f"the profiler saw {len(found)} of {2 * self._num_added} markers among {len(events)} events"
            )
        # Behind every second one is what was done between the steps.
        self.parts = found[::2]


@contextmanager
def recorded(device: str) -> Iterator[Recording]:
    """The only recording of the process."""
    # CUPTI's teardown has crashed beside CUDA graphs.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    recording = Recording(device)
    with ExitStack() as stack:
        with warnings.catch_warnings():
            # Of a second cycle, which there is not. acc_events, its remedy, would read all names as UTF-8.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each cycle", UserWarning)
            profiler = stack.enter_context(profile(activities=[_SEEN[device][0]]))
        yield recording
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        # Names of kernels may hold bytes that are no UTF-8.
        recording.end(json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False))


def cut(events: Sequence[Event], marker: str) -> list[list[Event]]:
    """What lies behind each marker, up to the next."""
    parts: list[list[Event]] = []
    for event in events:
        if marker in event.name:
            parts.append([])
        elif parts:
            parts[-1].append(event)
    return parts


def events_of(trace: dict[str, Any], categories: Collection[str] = DEVICE_WORK) -> list[Event]:
    """Events of a Chrome trace, by their beginning."""
    found = [
        Event(
            str(event.get("name")),
            tuple(int(size) for size in (event.get("args") or {}).get("grid", ())),
            float(event["ts"]),
            float(event.get("dur", 0.0)),
        )
        for event in trace.get("traceEvents", [])
        if event.get("ph") == "X" and event.get("cat") in categories
    ]
    return sorted(found, key=lambda event: event.start_us)


def summarise(events: Sequence[Event], num_steps: int, device_us: float, top: int = TOP) -> Table:
    """A step's kernels, the longest first, and what lies between them.

    device_us: of a step, timed without the profiler. kernels_us: all kernels together. gap_us: device_us without
    them. overlap_us: what of kernels_us ran beside another kernel.
    """
    by_kernel: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    for event in events:
        by_kernel.setdefault((event.name, event.grid), []).append(event.us)
    ranked = sorted(by_kernel.items(), key=lambda item: -sum(item[1]))
    lines = [_line(*kernel, us, num_steps) for kernel, us in ranked[:top]]
    if others := ranked[top:]:
        lines.append(_line(f"({len(others)} others)", (), [one for _, us in others for one in us], num_steps))
    total = sum(event.us for event in events)
    return {
        "device_us": round(device_us, 1), "kernels_us": round(total / num_steps, 1),
        "gap_us": round(device_us - total / num_steps, 1),
        "overlap_us": round((total - busy_us(events)) / num_steps, 1),
        "launches": round(len(events) / num_steps, 1), "top": lines,
    }  # fmt: skip


def _line(name: str, grid: tuple[int, ...], us: list[float], num_steps: int) -> Table:
    return {
        "name": shortened(name), "grid": "x".join(map(str, grid)), "launches": round(len(us) / num_steps, 2),
        "us": round(sum(us) / num_steps, 1), "us_each": round(sum(us) / len(us), 2),
    }  # fmt: skip


def busy_us(events: Sequence[Event]) -> float:
    """Time in which at least one of the events, which are in order, ran."""
    total, end = 0.0, float("-inf")
    for event in events:
        total += max(0.0, event.start_us + event.us - max(event.start_us, end))
        end = max(end, event.start_us + event.us)
    return total


def shortened(name: str) -> str:
    """A kernel's name without return type, parameters and namespaces that say nothing; cut at NAME_WIDTH."""
    name = re.sub(r"\(anonymous namespace\)::|at::native::|cutlass::|flashinfer::|c10::", "", name)
    name = _without_parameters(name.removeprefix("void ").strip())
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 3]}..."


def _without_parameters(name: str) -> str:
    """Up to the parenthesis that opens outside of all template arguments; Memcpy (what) stays whole."""
    depth = 0
    for at, letter in enumerate(name):
        if letter == "(" and depth == 0 and at and name[at - 1] != " ":
            return name[:at]
        depth += (letter in _OPEN) - (letter in _CLOSE)
    return name


def shown(table: Table) -> list[str]:
    """Lines to print."""
    return [
        f"device {table['device_us']} us = kernels {table['kernels_us']} + gap {table['gap_us']}"
        f" (overlap {table['overlap_us']}, {table['launches']} launches a step)",
        f"{'kernel':{NAME_WIDTH}} {'grid':>12} {'launches':>8} {'us':>9} {'us each':>8}",
        *(
            f"{line['name']:{NAME_WIDTH}} {line['grid']:>12} {line['launches']:>8g} {line['us']:>9.1f}"
            f" {line['us_each']:>8.2f}"
            for line in table["top"]
        ),
    ]
