"""Runs of the pool benchmark: one load in one mode, and the search for a split mode's best ratio."""

import gc
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.bench.pool_engine import STEP_S, Engine
from tests.bench.pool_loads import LONG_FROM, LONG_TO, SAMPLE, Horizon, Job, Trace, held_bytes, make_jobs
from tests.bench.pool_memory import SplitMemory, make_memory
from tests.bench.pool_modes import GIB, RING_BYTES, SPLIT, STATE_BYTES, STATE_LAYERS, make_mode
from tests.bench.pool_record import Record

logger = logging.getLogger(__name__)

Row = dict[str, Any]
WARM_UP = 1 / 3
"""Share of the steps before the window; the shifting load's is shorter, so that all its parts count."""
SHIFTING_WARM_UP = 0.2
SHIFTING_STEPS = 3
"""Times the steps of other loads, so that each part is long beside the life of its requests."""
FACTOR = 2**0.5
"""Between two ratios of a search; the best one's neighbours are then tried at half of that."""
MAX_CLIMB = 6
COMMON_RATIOS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Where the best single ratio over all loads is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A load of one seed against a memory of one size."""

    load: str
    gib: int
    seed: int
    steps: int


@dataclass(slots=True)
class Bench:
    """Makes runs, keeps the jobs of the last case, and all rows."""

    traces: dict[str, Trace] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    _jobs: dict[Case, list[Job]] = field(default_factory=dict)

    def jobs(self, case: Case) -> list[Job]:
        """The same for all modes."""
        if case not in self._jobs:
            if len(self._jobs) > 2:
                self._jobs.clear()
            horizon = Horizon(arena_bytes=case.gib * GIB, seconds=case.steps * STEP_S, step_s=STEP_S)
            self._jobs[case] = make_jobs(case.load, case.seed, horizon, self.traces.get(case.load))
        return self._jobs[case]

    def run(self, mode_name: str, case: Case, ratio: float = 0.0) -> Row:
        """One row. A split in which no request fits runs none."""
        jobs, row = self.jobs(case), _head(mode_name, case, ratio)
        try:
            memory = make_memory(make_mode(mode_name, case.gib * GIB, ratio))
        except ValueError as error:
            memory, row["impossible"] = None, str(error)
        if isinstance(memory, SplitMemory) and not memory.states.num_admissible:
            memory, row["impossible"] = None, "the state pool holds no request"
        if memory is None:
            row |= {"mean_running": 0.0, "max_running": 0, "wait_s": case.steps * STEP_S, "hit_tokens": 0}
            row |= {"waste_bytes": case.gib * GIB}
        else:
            warm_up = SHIFTING_WARM_UP if case.load == "shifting" else WARM_UP
            engine = Engine(memory, jobs, Record(int(warm_up * case.steps)))
            gc.disable()
            for _ in range(case.steps):
                engine.step()
            gc.enable()
            row |= engine.row()
            if case.load == "shifting":
                bounds = (SHIFTING_WARM_UP, LONG_FROM, LONG_TO, 1.0)
                row["mean_running_by_part"] = [engine.record.mean_running(*bounds[i : i + 2]) for i in range(3)]
        gc.collect()
        logger.info("ran mode=%s ratio=%.3g case=%s running=%.1f", mode_name, ratio, case, row["mean_running"])
        self.rows.append(row)
        return row

    def guess(self, mode_name: str, case: Case) -> float:
        """The ratio by the load's own proportions."""
        return guess_ratio(mode_name, self.jobs(case))

    def best_ratio(self, mode_name: str, case: Case) -> float:
        """The ratio with the most running requests: a climb from the load's own proportions."""
        tried: dict[float, float] = {}

        def running(ratio: float) -> float:
            if ratio not in tried:
                tried[ratio] = self.run(mode_name, case, ratio)["mean_running"]
            return tried[ratio]

        best = climb(running, self.guess(mode_name, case))
        return max((best, best * FACTOR**0.5, best / FACTOR**0.5), key=running)


def climb(value: Callable[[float], float], first: float) -> float:
    """Of first * FACTOR**i a local maximum of value."""
    best = first
    for _ in range(MAX_CLIMB):
        following = max((best, best * FACTOR, best / FACTOR), key=value)
        if following == best:
            break
        best = following
    return best


def guess_ratio(mode_name: str, jobs: list[Job]) -> float:
    """State bytes over KV bytes of a running request, to three digits."""
    some = jobs[:SAMPLE]
    state = STATE_LAYERS * (STATE_BYTES + RING_BYTES)
    kv = sum(held_bytes(job.prompt_len, job.end_len) for job in some) / len(some) - state
    return float(f"{make_mode(mode_name, GIB, 1.0).state_run_bytes / kv:.3g}")


def _head(mode_name: str, case: Case, ratio: float) -> Row:
    return {
        "mode": mode_name,
        "ratio": ratio if mode_name in SPLIT else None,
        "gib": case.gib,
        "load": case.load,
        "seed": case.seed,
    }


def medians(rows: list[Row]) -> Row:
    """One row for several seeds: the median of every number, the first row's word for the rest."""
    out = dict(rows[0])
    for key, value in out.items():
        if key == "waste":
            out[key] = _median_waste([row.get(key, {}) for row in rows])
        elif isinstance(value, list):
            out[key] = [statistics.median(column) for column in zip(*(row[key] for row in rows), strict=True)]
        elif isinstance(value, int | float) and key not in ("ratio", "gib"):
            out[key] = statistics.median(row[key] for row in rows if key in row)
    out["seed"] = None
    out["seeds"] = len(rows)
    return out


def _median_waste(wastes: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    keys = dict.fromkeys((cause, kind) for waste in wastes for cause, kinds in waste.items() for kind in kinds)
    out: dict[str, dict[str, float]] = {}
    for cause, kind in keys:
        out.setdefault(cause, {})[kind] = statistics.median(waste.get(cause, {}).get(kind, 0) for waste in wastes)
    return out
