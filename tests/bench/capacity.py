"""How many requests of 4,096 tokens a server runs at the same time, and what it gives at more than 32 at a time.

    python -m tests.bench.capacity --geometry qwen38-27b-dflash2 --json docs/benchmarks/capacity-h200.json

starts a server as tests.bench.ladder does, with --mem-fraction-static 0.85, and sends N requests at once that are all
to be at 4,096 tokens at the same time. They fit if there was a moment when each had its first token and none its last,
and none was taken back. The largest such N is searched for, from what the memory plan says on. Then come the ladder's
loads at each of --rungs, and what was refused, taken back or failed in them.
JSON: {"requests_4k", "requests_4k_planned", "peer_bytes", "c64": {...}, "c96": {...}, "is_most", "trials", "config"}.
peer_bytes is what another engine with the same share of the card has for everything. The file is written anew whenever
there is something new.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.config import CPU_PREFILL_TOKENS
from tests.bench.capacity_search import Found, Trial, asks_of, most_at_once, planned, search
from tests.bench.ladder import add_server_flags, facts, load_at, server_flags, without_serial
from tests.bench.ladder_geometry import LADDERS, Ladder
from tests.bench.mixed_load import options_of, run_asks
from tests.load.call import Outcome
from tests.support.served import Served

_READY_S = 500.0
"""Kernels of a hybrid are compiled, and graphs captured, before the first request."""
_COUNTED = {"retracted": "memsvc_retracts_total", "refused": "memsvc_requests_turned_away_total"}
"""Counters of /metrics."""


def counted(server: Served) -> dict[str, int]:
    """Retractions and refusals since the server's start."""
    values = {sample.name: sample.value for sample in server.metrics()}
    return {name: int(values[metric]) for name, metric in _COUNTED.items()}


def find_most(server: Served, args: argparse.Namespace, first: int) -> Found:
    """Requests of --tokens that run at the same time; first: the best guess."""
    ladder = LADDERS[args.geometry]
    told = re.search(r"max_prefill_tokens=(\d+)", "".join(server.lines))
    budget = int(told[1]) if told else CPU_PREFILL_TOKENS

    def attempt(num: int) -> Trial:
        asks = asks_of(num, args.tokens, args.tail, tokens_a_step=args.accept_length, budget=budget)
        before = counted(server)["retracted"]
        # Other prompts in every trial, of which the prefix cache knows nothing.
        result = run_asks(asks, options_of(server.url, asks, num, ladder.vocab_size, seed=num))
        trial = Trial(
            num=num, live=most_at_once(result.calls), retracted=counted(server)["retracted"] - before,
            failed=sum(call.outcome is not Outcome.COMPLETED for call in result.calls),
        )  # fmt: skip
        print(f"{trial} fits={trial.fits} wall_s={result.wall_s:.1f}", flush=True)
        return trial

    return search(attempt, first, args.slots, args.trials)


def rung(server: Served, ladder: Ladder, c: int) -> dict[str, Any]:
    """The ladder's load with c at a time, whatever becomes of it."""
    before = counted(server)
    report = load_at(server.url, ladder, c, max_tokens=ladder.max_tokens, requests=max(3, 2 * c))
    figures = ("output_tok_s", "completed", "failed", "ttft_ms_p50", "tpot_ms_p50", "accept_length")
    row = {name: report[name] for name in figures}
    row |= {name: num - before[name] for name, num in counted(server).items()}
    print(f"c={c} {row}", flush=True)
    return row | {"errors": report["errors"]}


def measure(args: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Everything, in one server. save is called whenever there is something new."""
    ladder = LADDERS[args.geometry]
    with (
        tempfile.TemporaryDirectory(prefix="capacity-") as folder,
        Served(server_flags(ladder, Path(folder), args), ready_s=_READY_S, log=args.log) as server,
    ):
        result = conditions(server, args)
        # Not counted: what is compiled, or first allocated, by the first requests.
        load_at(server.url, ladder, max(args.concurrency), max_tokens=16, requests=max(args.concurrency))
        found = find_most(server, args, result["requests_4k_planned"])
        result |= {
            "requests_4k": found.num, "is_most": found.is_most,
            "trials": [asdict(trial) | {"fits": trial.fits} for trial in found.trials],
        }  # fmt: skip
        save(result)
        for c in args.concurrency:
            result[f"c{c}"] = rung(server, ladder, c)
            save(result)
    return result


def conditions(server: Served, args: argparse.Namespace) -> dict[str, Any]:
    """What is known of a server that has just started."""
    ladder, plan = LADDERS[args.geometry], server.get("/server_info")["memory_plan"]
    config = {
        "geometry": args.geometry, "device": args.device, "tokens": args.tokens, "tail": args.tail,
        "accept_length": args.accept_length, "spec_tokens": args.spec_tokens or ladder.num_drafts,
        "prompt_tokens": ladder.prompt_tokens, "output_tokens": ladder.max_tokens, "requests": "max(3, 2c)",
        "mem_fraction_static": args.share, "slots": args.slots, "flags": args.more,
        "start_s": round(server.start_s, 1), "arena_bytes": plan["arena_bytes"],
        "plan": [without_serial(line) for line in plan["lines"]], "facts": facts(server.lines),
    }  # fmt: skip
    return {
        "requests_4k": None, "requests_4k_planned": planned(plan, args.tokens),
        "peer_bytes": int(args.share * plan["device"]["total_bytes"]) if plan["device"] else None, "config": config,
    }  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.capacity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_flags(parser, "qwen38-27b-dflash2")
    parser.add_argument("--tokens", type=int, default=4096, help="of each request, prompt and answer")
    parser.add_argument("--tail", type=int, default=256, help="of these, decoded when the last prompt is done")
    parser.add_argument("--share", type=float, default=0.85, help="--mem-fraction-static of the server")
    parser.add_argument("--slots", type=int, default=128, help="--max-running-requests: no search goes further")
    parser.add_argument("--trials", type=int, default=5, help="at most")
    parser.add_argument(
        "--rungs", dest="concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[64, 96]
    )
    parser.add_argument("more", nargs="*", help="more flags of python -m launch, after --", metavar="FLAG")
    args = parser.parse_args(argv)
    ladder = LADDERS[args.geometry]
    context = 256 + max(args.tokens, ladder.prompt_tokens + ladder.max_tokens)
    args.flags = [
        "--context-length", str(context), "--max-running-requests", str(args.slots),
        "--cuda-graph-max-bs", str(max(64, *args.concurrency)), "--mem-fraction-static", str(args.share), *args.more,
    ]  # fmt: skip
    return args


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 if there is nothing to be said."""
    args = parse(argv)

    def save(result: dict[str, Any]) -> None:
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    try:
        result = measure(args, save)
    except (AssertionError, ValueError, OSError) as error:  # the server did not start, or left
        print(f"capacity: {error}", file=sys.stderr)
        return 1
    most = "" if result["is_most"] else " at least"
    print(f"requests of {args.tokens} tokens at once:{most} {result['requests_4k']},"
          f" planned {result['requests_4k_planned']}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
