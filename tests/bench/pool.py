"""How many requests run at once in one pool for all kinds, and in four other ways to use the same memory.

`python -m tests.bench.pool --json FILE` replays loads against the memory manager alone, with a simulated
clock and without sockets; docs/benchmarks/pool.md says what is modelled. Split modes run at a ratio that
is searched for every load and size. A table is printed last.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import memsvc.core
from tests.bench.pool_facts import all_facts
from tests.bench.pool_loads import DISTRIBUTIONS, read_azure, read_mooncake
from tests.bench.pool_modes import MODES, NUM_DRAFTS, PADDED_PAGE_SIZE, RING_BYTES, SPLIT, STATE_BYTES
from tests.bench.pool_sweep import COMMON_RATIOS, SHIFTING_STEPS, Bench, Case, Row, medians
from tests.bench.pool_table import common_ratios, table

COMMON_GIB = 40
"""The size at which the best ratio over all loads is looked for."""


def options(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pool", description=__doc__)
    parser.add_argument("--json", type=Path, help="write all rows and figures to this file")
    parser.add_argument("--pool-mode", choices=("all", *MODES), default="all")
    parser.add_argument("--state-ratio", type=float, help="of the split modes; searched for if not given")
    parser.add_argument("--mooncake", type=Path, help="mooncake_conversation.jsonl; else a synthetic mix")
    parser.add_argument("--azure", type=Path, help="azure_conv.csv; else lengths like its")
    parser.add_argument("--gib", type=int, nargs="+", default=[20, 30, 40, 60])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240, help="forwards a run, a third of them warm-up")
    parser.add_argument("--loads", nargs="+", help="some of the loads only")
    parser.add_argument("--quick", action="store_true", help="20 GiB, one seed, 120 steps, one ratio")
    args = parser.parse_args(argv)
    if args.quick:
        args.gib, args.seeds, args.steps = [20], 1, 120
    return args


def measure(bench: Bench, args: argparse.Namespace, loads: list[str]) -> list[Row]:
    """One row for each mode, load and size: medians over the seeds, split modes at their best ratio."""
    modes = MODES if args.pool_mode == "all" else (args.pool_mode,)
    summary = []
    for gib in args.gib:
        for load in loads:
            cases = [Case(load=load, gib=gib, seed=seed, steps=_steps(args, load)) for seed in range(args.seeds)]
            for mode in modes:
                summary.append(_measure_one(bench, args, mode, cases))
                print(".", end="", file=sys.stderr, flush=True)
    return summary


def _steps(args: argparse.Namespace, load: str) -> int:
    return args.steps * SHIFTING_STEPS if load == "shifting" and not args.quick else args.steps


def _measure_one(bench: Bench, args: argparse.Namespace, mode: str, cases: list[Case]) -> Row:
    ratio = 0.0
    if mode in SPLIT:
        ratio = args.state_ratio or (bench.guess(mode, cases[0]) if args.quick else bench.best_ratio(mode, cases[0]))
    done = [row for row in bench.rows if _is_of(row, mode, cases[0], ratio)]
    rows = done[:1] + [bench.run(mode, case, ratio) for case in cases[len(done[:1]) :]]
    return medians(rows)


def _is_of(row: Row, mode: str, case: Case, ratio: float) -> bool:
    told = (row["mode"], row["load"], row["gib"], row["seed"], row["ratio"] or 0.0)
    return told == (mode, case.load, case.gib, case.seed, ratio)


def measure_common(bench: Bench, args: argparse.Namespace, loads: list[str]) -> list[Row]:
    """Every split mode at ratios that are the same for all loads, one seed."""
    rows = []
    for load in loads:
        case = Case(load=load, gib=COMMON_GIB, seed=0, steps=_steps(args, load))
        for mode in SPLIT if args.pool_mode == "all" else ():
            rows += [bench.run(mode, case, ratio) for ratio in COMMON_RATIOS]
            print(".", end="", file=sys.stderr, flush=True)
    return rows


def main(argv: list[str]) -> None:
    """Measure, write, print."""
    logging.basicConfig(level=logging.WARNING)
    args, began = options(argv), time.monotonic()
    bench = Bench()
    loads = ["short", "long", "mixed", "shifting"]
    for name, path, read in (("mooncake", args.mooncake, read_mooncake), ("azure", args.azure, read_azure)):
        loads.append(name if path else f"{name}-like")
        if path:
            bench.traces[name] = read(path)
    loads = [load for load in loads if not args.loads or load in args.loads]
    summary = measure(bench, args, loads)
    common = common_ratios([] if args.quick or args.state_ratio else measure_common(bench, args, loads))
    report: dict[str, Any] = {
        "rows": summary,
        "single_ratio_for_all_loads": common,
        "sweep": [_brief(row) for row in bench.rows if row["ratio"] is not None],
        **all_facts(5 if args.quick else 25),
        "distributions": {load: DISTRIBUTIONS[load] for load in loads},
        "setup": _setup(args) | {"took_s": time.monotonic() - began},
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, default=str) + "\n", "utf-8")
    print(table(report))


def _brief(row: Row) -> Row:
    return {key: row[key] for key in ("mode", "ratio", "gib", "load", "seed", "mean_running")}


def _setup(args: argparse.Namespace) -> Row:
    return {
        "steps": args.steps,
        "seeds": args.seeds,
        "num_drafts": NUM_DRAFTS,
        "state_layer_bytes": STATE_BYTES,
        "ring_layer_bytes": RING_BYTES,
        "padded_page_size": PADDED_PAGE_SIZE,
        "compiled": memsvc.core.COMPILED,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
