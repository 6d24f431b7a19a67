"""Throughput of a whole server over the number of requests at a time, with random weights and simulated acceptance.

    python -m tests.bench.ladder --geometry qwen3-8b-dflash --json docs/benchmarks/ladder-qwen3-8b-h200.json

makes the models' folders, starts `python -m launch`, sends max(3, 2c) requests of random token ids with c at a time
through the client of tests.load, and prints a table beside another engine's figures. The client's processor time is
part of it: near 1.0 of the wall time it is the client that is measured. JSON: {"rows": [...], "config": {...}}.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from tests.bench.ladder_geometry import LADDERS, Ladder
from tests.load.options import LoadOptions
from tests.load.report import make_report, verdict
from tests.load.run import run_load
from tests.support.served import Served

_READY_S = 400.0
"""Kernels are compiled and graphs captured before the first request."""
_SLOTS = 32
"""Requests that hold memory at once, unless a rung has more."""
_COLUMNS = "{:>4} {:>12} {:>10} {:>7} {:>11} {:>11} {:>8} {:>11} {:>7}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """What a number of requests at a time gave."""

    c: int
    report: dict[str, Any]
    """Of tests.load."""

    @property
    def row(self) -> dict[str, Any]:
        """As it goes into the JSON."""
        return {"c": self.c, **{name: self.report[name] for name in ("output_tok_s", "ttft_ms_p50", "tpot_ms_p50")}}

    @property
    def client_share(self) -> float:
        """Of one processor, what the client took."""
        return self.report["client_cpu_s"] / self.report["wall_s"]


def server_flags(ladder: Ladder, folder: Path, args: argparse.Namespace) -> list[str]:
    """Of `python -m launch`."""
    target, drafter = ladder.write(folder)
    slots = max(_SLOTS, *args.concurrency)
    flags = [
        "--model-path", str(target), "--speculative-draft-model-path", str(drafter),
        "--spec-tokens", args.spec_tokens or str(ladder.num_drafts), "--load-format", "dummy",
        "--simulate-accept-length", str(args.accept_length), "--device", args.device,
        "--context-length", str(ladder.prompt_tokens + ladder.max_tokens + 256),
        "--max-running-requests", str(slots),
    ]  # fmt: skip
    return [*flags, *args.flags]


def climb(url: str, ladder: Ladder, concurrency: int, *, max_tokens: int, requests: int) -> dict[str, Any]:
    """The report of one load."""
    options = LoadOptions(
        url=url, concurrency=concurrency, requests=requests, chat=False, token_ids=ladder.vocab_size,
        prompt_tokens=ladder.prompt_tokens, max_tokens=max_tokens, ignore_eos=True, seed=1000 * concurrency + max_tokens,
    )  # fmt: skip
    report = make_report(uvloop.run(run_load(options)), options)
    if reason := verdict(report):
        raise RuntimeError(f"c={concurrency}: {reason}: {report['errors']}")
    return report


def measure(args: argparse.Namespace) -> tuple[list[Rung], dict[str, Any]]:
    """All rungs, and under what conditions."""
    ladder = LADDERS[args.geometry]
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        flags = server_flags(ladder, Path(folder), args)
        served = Served(flags, ready_s=_READY_S)
        try:
            with served as server:
                rungs = list(_rungs(server, ladder, args.concurrency))
        finally:
            if args.log:
                args.log.write_text("".join(served.lines), encoding="utf-8")
    config = {
        "geometry": args.geometry, "device": args.device, "prompt_tokens": ladder.prompt_tokens,
        "output_tokens": ladder.max_tokens, "requests": "max(3, 2c)", "accept_length": args.accept_length,
        "spec_tokens": args.spec_tokens or ladder.num_drafts, "load_format": "dummy", "flags": args.flags,
        "start_s": round(served.start_s, 1), "peer_output_tok_s": dict(ladder.peer), "facts": facts(served.lines),
        "accept_lengths": {rung.c: rung.report["accept_length"] for rung in rungs},
        "client_cpu_shares": {rung.c: round(rung.client_share, 3) for rung in rungs},
    }  # fmt: skip
    return rungs, config


def _rungs(server: Served, ladder: Ladder, concurrency: Sequence[int]) -> Iterator[Rung]:
    """Each is printed as it is done."""
    most = max(concurrency)
    # Not counted: what is compiled, or first allocated, by the first requests.
    climb(server.url, ladder, most, max_tokens=16, requests=most)
    for c in concurrency:
        report = climb(server.url, ladder, c, max_tokens=ladder.max_tokens, requests=max(3, 2 * c))
        rung = Rung(c=c, report=report)
        print(_line(rung, ladder), flush=True)
        yield rung


def facts(lines: list[str]) -> list[str]:
    """What the server says at start of its device, its attention, its memory and MPS."""
    starts = ("target: device", "target: attention", "device memory", "mps=", "plan: device")
    messages = [line.rstrip().partition(" INFO ")[2] for line in lines]
    return [message for message in messages if message.startswith(starts)]


def _line(rung: Rung, ladder: Ladder) -> str:
    rate, peer = rung.report["output_tok_s"], ladder.peer.get(rung.c)
    return _COLUMNS.format(
        rung.c, f"{rate:.1f}", f"{peer:.1f}" if peer else "-", f"{rate / peer:.2f}" if peer else "-",
        *(f"{rung.report[name]:.2f}" if rung.report[name] else "-" for name in ("ttft_ms_p50", "tpot_ms_p50")),
        rung.report["accept_length"], f"{rung.client_share:.2f}", rung.report["completed"],
    )  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", choices=LADDERS, default="qwen3-8b-dflash")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8, 16, 32]
    )
    parser.add_argument("--accept-length", type=float, default=4.0, help="simulated, bonus token included")
    parser.add_argument("--spec-tokens", default="", help="k, or auto; the geometry's own by default")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what the server logs, as with -- --spec-trace 2")
    parser.add_argument("flags", nargs="*", help="more flags of python -m launch, after --", metavar="FLAG")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 if a request failed."""
    args = parse(argv)
    print(
        _COLUMNS.format("c", "out tok/s", "peer", "ratio", "TTFT ms p50", "TPOT ms p50", "accept", "client cpu", "done")
    )
    try:
        rungs, config = measure(args)
    except (AssertionError, RuntimeError) as error:  # the server did not start, or requests failed
        print(f"ladder: {error}", file=sys.stderr)
        return 1
    if args.json:
        result = {"rows": [rung.row for rung in rungs], "config": config}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
