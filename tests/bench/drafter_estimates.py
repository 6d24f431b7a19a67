"""Accept lengths that trainings estimated on their way, and what lies between two of those estimates."""

import json
import math
from pathlib import Path
from typing import Any

KINDS = ("greedy", "sampled")
Estimates = dict[int, dict[str, Any]]
"""Lines of a train.jsonl, by step."""


def read_runs(runs: Path, names: list[str]) -> dict[str, Estimates]:
    """By name, of those that have a train.jsonl. Raises ValueError if none has one."""
    found = {name: _read(file) for name in names if (file := runs / name / "train.jsonl").is_file()}
    if not found:
        raise ValueError(f"{runs}: no variant has a train.jsonl")
    return found


def _read(file: Path) -> Estimates:
    lines = (json.loads(line) for line in file.read_text("utf-8").splitlines())
    return {line["step"]: line for line in lines if line["kind"] == "held_out"}


def last_common_step(found: dict[str, Estimates]) -> int:
    """The last step that all have an estimate at. Raises ValueError if there is none."""
    common = set.intersection(*map(set, found.values()))
    if not common:
        raise ValueError(f"no step of an estimate is in all of {', '.join(found)}")
    return max(common)


def lengths_of(line: dict[str, Any]) -> dict[str, float]:
    """Accept lengths of an estimate, by kind."""
    return {kind: line[f"accept_length_{kind}"] for kind in KINDS}


def at_step(estimates: Estimates, step: int) -> tuple[dict[str, float], list[int]]:
    """Accept lengths at a step, and the steps of the one or two estimates that they come from.

    Between two estimates they grow with the logarithm of the step: growth slows down, so that a straight line over
    steps would fall short. Raises ValueError where there is none before or none after.
    """
    if step in estimates:
        return lengths_of(estimates[step]), [step]
    before = max((known for known in estimates if known < step), default=None)
    after = min((known for known in estimates if known > step), default=None)
    if before is None or after is None:
        raise ValueError(f"step {step} is not between two estimates, which are at {sorted(estimates)}")
    share = math.log(step / before) / math.log(after / before)
    low, high = lengths_of(estimates[before]), lengths_of(estimates[after])
    return {kind: round(low[kind] + share * (high[kind] - low[kind]), 4) for kind in KINDS}, [before, after]
