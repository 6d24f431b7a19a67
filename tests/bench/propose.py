"""A/B of the ways to propose, on a CUDA device with random weights: times, the floor beside each, and equal tokens.

    python -m tests.bench.propose --geometry qwen38-27b-dflash2 --json > propose.json

prints {"rows": [...]} or, without --json, a table. device_us is a whole turn of the draft worker (features of the
newest verify into draft KV, forward, head, token choice, and what a Plan brings) and host_us the time to enqueue it;
floor_us is what weights, KV and arithmetic take at least. Sections come from a second worker whose graph is split.
As in serving, the host is ahead: the stream is busy until all of a turn is enqueued, in as many turns as hidden says
(sections_hidden, of the second worker's). In the others, which are those of slow routes, the host's time counts.
tokens_equal is the share of drafts that are the first route's; with --dtype float32 it is to be 1.
--from FILE --plot PICTURE draws an earlier --json and measures nothing.
`python -m tests.bench.propose_host` measures the CPU.
"""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch

from draft_worker.config import ROUTES
from tests.bench.plotting import add_plot_flags, check_plot_flags, over_requests, pyplot, read_result, save
from tests.bench.propose_geometry import GEOMETRIES
from tests.bench.propose_turns import Job, run_job

COLUMNS = (
    "geometry", "route", "rows_per_request", "concurrency", "context", "device_us", "floor_us", "ratio",
    "mem_us", "fwd_us", "head_us", "select_us", "host_us", "hidden", "sections_hidden", "tokens_equal",
)  # fmt: skip


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Device time over requests, a line for each route, and the floor. One picture for each geometry and block size."""
    groups = sorted({(row["geometry"], row["rows_per_request"]) for row in rows})
    figure, axes = pyplot().subplots(1, len(groups), figsize=(6 * len(groups), 4.5), squeeze=False)
    for axis, group in zip(axes[0], groups, strict=True):
        here = [row for row in rows if (row["geometry"], row["rows_per_request"]) == group]
        for route in dict.fromkeys(row["route"] for row in here):
            line = [row for row in here if row["route"] == route]
            axis.plot([row["concurrency"] for row in line], [row["device_us"] / 1e3 for row in line], "o-", label=route)
        floor = [row for row in here if row["route"] == here[0]["route"]]
        axis.plot([row["concurrency"] for row in floor], [row["floor_us"] / 1e3 for row in floor], "k--", label="floor")
        numbers = [row["concurrency"] for row in floor]
        over_requests(axis, numbers, "ms a propose", f"{group[0]}, B = {group[1]}")
    save(figure, path)


def _numbers(text: str) -> tuple[int, ...]:
    """1,2,4"""
    return tuple(int(part) for part in text.split(","))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.propose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen38-27b-dflash2")
    parser.add_argument("--routes", type=lambda text: text.split(","), default=list(ROUTES))
    parser.add_argument("--concurrency", type=_numbers, default=(1, 2, 4, 8, 16, 32))
    parser.add_argument("--context", type=int, default=1300, help="tokens of every request")
    parser.add_argument("--rows", type=_numbers, help="B, several with commas; the geometry's own by default")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--repeats", type=int, default=20, help="of paged; the slow routes have few")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_plot_flags(parser)
    args = parser.parse_args(argv)
    check_plot_flags(parser, args)
    if unknown := set(args.routes) - set(ROUTES):
        parser.error(f"--routes: {', '.join(sorted(unknown))} is none of {', '.join(ROUTES)}")
    if not args.source and not torch.cuda.is_available():
        parser.exit(1, "tests.bench.propose times CUDA graphs and finds no CUDA device: nothing was measured\n")
    return args


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows."""
    geometry = GEOMETRIES[args.geometry]
    rows = []
    for size in args.rows or geometry.rows:
        job = Job(
            name=args.geometry, geometry=geometry, rows=size, context=args.context, concurrency=args.concurrency,
            dtype=args.dtype, repeats=args.repeats,
        )  # fmt: skip
        rows += run_job(job, args.routes)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure and print, or only draw."""
    args = parse(argv)
    if args.source:
        plot(read_result(args.source)["rows"], args.plot)
        return
    logging.basicConfig(level=logging.WARNING)
    rows = run(args)
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
    else:
        print("  ".join(COLUMNS))
        for row in rows:
            print("  ".join(str(row[name]).rjust(len(name)) for name in COLUMNS))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
