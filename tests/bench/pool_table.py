"""The pool benchmark's figures as text: how many more requests the one pool runs than each other mode."""

import math
from typing import Any

from tests.bench.pool_modes import MODES, SPLIT
from tests.bench.pool_sweep import Row

GOALS = {
    ("static-scratch", "mixed"): 3.0,
    ("padded", "mixed"): 3.0,
    ("static-scratch", "mooncake"): 2.4,
    ("padded", "mooncake"): 2.4,
    ("static-scratch", "long"): 1.7,
    ("padded", "long"): 1.7,
    ("static-ring", "shifting"): 1.1,
}
"""Mean running requests over those of the mode, by mode and load."""
RING_GOAL = 0.97
"""The same against the ring modes under every load."""


def goal(mode: str, load: str) -> float:
    """What the one pool should reach; 0 where nothing was set."""
    name = load.removesuffix("-like")
    return GOALS.get((mode, name), RING_GOAL if mode.endswith("ring") else 0.0)


def ratios(rows: list[Row]) -> dict[tuple[str, int], dict[str, float]]:
    """By load and size, the one pool's mean running requests over each other mode's."""
    running = {(row["load"], row["gib"], row["mode"]): row["mean_running"] for row in rows}
    out: dict[tuple[str, int], dict[str, float]] = {}
    for (load, gib, mode), value in running.items():
        own = running.get((load, gib, "unified"))
        if mode != "unified" and own is not None:
            out.setdefault((load, gib), {})[mode] = own / value if value else math.inf
    return out


def common_ratios(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """By split mode, the ratio with the largest geometric mean of running requests over all loads."""
    out: dict[str, dict[str, Any]] = {}
    for mode in SPLIT:
        by_ratio: dict[float, dict[str, float]] = {}
        for row in rows:
            if row["mode"] == mode:
                by_ratio.setdefault(row["ratio"], {})[row["load"]] = row["mean_running"]
        if by_ratio:
            best = max(by_ratio, key=lambda ratio: _log_mean(list(by_ratio[ratio].values())))
            out[mode] = {"ratio": best, "gib": rows[0]["gib"], "mean_running": by_ratio[best]}
    return out


def _log_mean(values: list[float]) -> float:
    return sum(math.log(max(value, 1e-3)) for value in values) / len(values)


def table(report: dict[str, Any]) -> str:
    """A line for each load and size; * marks a ratio below its goal."""
    rows = report["rows"]
    by_case = {(row["load"], row["gib"], row["mode"]): row for row in rows}
    others = [mode for mode in MODES if mode != "unified"]
    lines = [
        "mean running requests (split modes: ratio), and the one pool over each",
        f"{'load':<14}{'GiB':>4}{'unified':>9}" + "".join(f"{mode:>24}" for mode in others),
    ]
    for (load, gib), values in ratios(rows).items():
        line = f"{load:<14}{gib:>4}{by_case[load, gib, 'unified']['mean_running']:>9.1f}"
        for mode in others:
            line += _cell(by_case.get((load, gib, mode)), values.get(mode), goal(mode, load))
        lines.append(line)
    for mode, found in report["single_ratio_for_all_loads"].items():
        means = ", ".join(f"{load} {value:.1f}" for load, value in found["mean_running"].items())
        lines.append(f"{mode} at the best single ratio for all loads, {found['ratio']:g}, {found['gib']} GiB: {means}")
    geometry = report["geometry_waste"]
    by_kind = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in geometry["by_kind"].items())
    lines += [
        f"requests of 4,096 tokens: 60 GiB {report['requests_4k_60gib']}, over a full warm tree "
        f"{report['requests_4k_60gib_warm']}, padded {report['requests_4k_60gib_padded']}; 30 GiB {report['requests_4k_30gib']}",
        f"60 of them in 30 GiB: {_fits(report['run_60_of_4k_in_30gib'])}; 32 in 16 GiB: "
        f"{_fits(report['run_32_of_4k_in_16gib'])}",
        f"geometry waste: {by_kind}; of a 4,096-token request {100 * geometry['request_4k']:.2f} %",
        f"Step of 32 requests: {report['step32']['median']:.0f} us, p99 {report['step32']['p99']:.0f} us, "
        f"compiled: {report['step32']['compiled']}",
    ]
    return "\n".join(lines)


def _cell(row: Row | None, value: float | None, least: float) -> str:
    if row is None or value is None:
        return f"{'-':>24}"
    split = f" ({row['ratio']:.2g})" if row["ratio"] is not None else ""
    mark = "*" if value < least else ""
    return f"{row['mean_running']:.1f}{split} x{value:.2f}{mark}".rjust(24)


def _fits(found: dict[str, Any]) -> str:
    return "fit" if found["fits"] and found["answered"] >= found["of"] - 4 else f"do not fit: {found}"
