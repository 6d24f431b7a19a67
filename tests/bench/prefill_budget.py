"""What prompts cost those who decode beside them, by --chunked-prefill-size: times to and between tokens of one load.

    python -m tests.bench.prefill_budget --geometry qwen3-8b-dflash --budgets 1024,2048,4096,8192 --c 16 --json FILE

starts a server for each budget and keeps c requests at a time in it, with prompts of random lengths: so prompts come
when others decode. The same requests for every budget. The first c come all at once and count for throughput only.
JSON: {"rows": [{budget, c, ttft_ms_p50, ttft_ms_p99, tpot_ms_p50, tpot_ms_p99, gap_ms_p99, output_tok_s}], "config"}.
gap_ms_p99: between two arrivals of tokens at the server's front, as the bound of its histogram that holds 99 % of them.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.ladder import add_server_flags, facts, server_flags
from tests.bench.ladder_geometry import LADDERS
from tests.bench.mixed_load import Ask, options_of, run_asks
from tests.load.report import make_report, verdict
from tests.support.served import Served

_READY_S = 500.0
_GAPS = "memsvc_chunk_gap_seconds_bucket"
_TIMES = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
_COLUMNS = ("budget", "c", *_TIMES, "gap_ms_p99", "output_tok_s")


def asks_of(num: int, lengths: tuple[int, int], answer: int) -> list[Ask]:
    """Prompts of any length between the two, the same ones whenever they are asked for."""
    rng = random.Random(f"prompts {num}")
    return [Ask(rng.randint(*lengths), answer) for _ in range(num)]


def gaps(server: Served) -> dict[float, float]:
    """Since the server's start: (upper bound in seconds, gaps up to it)."""
    return {float(sample.labels["le"]): sample.value for sample in server.metrics() if sample.name == _GAPS}


def bound_ms(before: dict[float, float], after: dict[float, float], share: float) -> float | None:
    """The least bound that holds this share of the gaps in between; None if that is none, or if there were no gaps."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values(), default=0.0)
    held = [bound for bound, count in counts.items() if total and count >= share * total]
    return round(held[0] * 1e3, 3) if held and held[0] != float("inf") else None


def row_of(server: Served, budget: int, asks: Sequence[Ask], args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one load. Raises RuntimeError if a request failed."""
    vocab = LADDERS[args.geometry].vocab_size
    # Not counted: what is compiled, or first allocated, by the first requests.
    warm = [replace(ask, answer=16) for ask in asks[: args.c]]
    run_asks(warm, options_of(server.url, warm, args.c, vocab, seed=1))
    options, before = options_of(server.url, asks, args.c, vocab, seed=2), gaps(server)
    result = run_asks(asks, options)
    whole = make_report(result, options)
    if reason := verdict(whole):
        raise RuntimeError(f"budget={budget}: {reason}: {whole['errors']}")
    later = make_report(replace(result, calls=result.calls[args.c :]), options)
    return {
        "budget": budget, "c": args.c, **{name: later[name] for name in _TIMES},
        "gap_ms_p99": bound_ms(before, gaps(server), 0.99), "output_tok_s": whole["output_tok_s"],
    }  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A row for each budget. The file is written anew after each."""
    ladder, asks = LADDERS[args.geometry], asks_of(args.requests, args.prompts, args.answer)
    config = {
        "geometry": args.geometry, "device": args.device, "prompts": list(args.prompts), "answer": args.answer,
        "requests": args.requests, "accept_length": args.accept_length, "flags": args.more,
        "spec_tokens": args.spec_tokens or ladder.num_drafts, "facts": {},
    }  # fmt: skip
    found: dict[str, Any] = {"rows": [], "config": config}
    print(" ".join(f"{name:>12}" for name in _COLUMNS), flush=True)
    for budget in args.budgets:
        args.flags = [
            "--context-length", str(args.prompts[1] + args.answer + 256), "--chunked-prefill-size", str(budget),
            *args.more,
        ]  # fmt: skip
        with (
            tempfile.TemporaryDirectory(prefix="budget-") as folder,
            Served(server_flags(ladder, Path(folder), args), ready_s=_READY_S, log=args.log) as server,
        ):
            row = row_of(server, budget, asks, args)
        found["rows"].append(row)
        config["facts"][str(budget)] = facts(server.lines)
        print(" ".join(f"{row[name] if row[name] is not None else '-':>12}" for name in _COLUMNS), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.prefill_budget", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_server_flags(parser, "qwen3-8b-dflash")
    parser.add_argument("--budgets", type=_numbers, default=(1024, 2048, 4096, 8192), help="--chunked-prefill-size")
    parser.add_argument("--c", type=int, default=16, help="requests at a time")
    parser.add_argument("--requests", type=int, default=0, help="of each budget; 0: eight times c")
    parser.add_argument("--prompts", type=_numbers, default=(256, 4096), metavar="SHORTEST,LONGEST", help="in tokens")
    parser.add_argument("--answer", type=int, default=256, help="tokens of each")
    parser.add_argument("more", nargs="*", help="more flags of python -m launch, after --", metavar="FLAG")
    args = parser.parse_args(argv)
    args.requests = args.requests or 8 * args.c
    if args.c < 1 or args.requests <= args.c:
        parser.error(f"--requests must be more than --c, not {args.requests} for {args.c}")
    if len(args.prompts) != 2 or not 0 < args.prompts[0] <= args.prompts[1]:
        parser.error(f"--prompts takes two lengths, the shorter first, not {args.prompts}")
    args.concurrency = [args.c]
    return args


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 if a server did not start, or a request failed."""
    args = parse(argv)
    try:
        measure(args)
    except (AssertionError, RuntimeError, OSError) as error:
        print(f"prefill_budget: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
