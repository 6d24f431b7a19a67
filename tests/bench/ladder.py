"""Throughput of a whole server over the number of requests at a time, with random weights and simulated acceptance.

    python -m tests.bench.ladder --geometry qwen3-8b-dflash --json docs/benchmarks/ladder-qwen3-8b-h200.json

makes the models' folders, starts `python -m launch`, sends max(3, 2c) requests of random token ids with c at a time
through the client of tests.load, and prints a table beside another engine's figures. The client's processor time is
part of it: near 1.0 of the wall time it is the client that is measured. JSON: {"rows": [...], "config": {...}}.
With --repeat each figure is a median of several turns, with other prompts each.
--from FILE --plot PICTURE draws an earlier --json and measures nothing.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from tests.bench.ceilings import ceilings_apart
from tests.bench.ladder_geometry import LADDERS, PEER, Ladder
from tests.bench.ladder_plot import plot
from tests.bench.plotting import add_plot_flags, check_plot_flags, read_result
from tests.load.options import LoadOptions
from tests.load.report import make_report, verdict
from tests.load.run import run_load
from tests.support.served import Served

_READY_S = 400.0
"""Kernels are compiled and graphs captured before the first request."""
_SLOTS = 32
"""Requests that hold memory at once, unless a rung has more."""
_SERIAL = re.compile(r", GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_COLUMNS = "{:>4} {:>12} {:>10} {:>7} {:>11} {:>11} {:>8} {:>11} {:>7}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """What a number of requests at a time gave."""

    c: int
    reports: Sequence[dict[str, Any]]
    """Of tests.load, one a turn."""

    def each(self, name: str) -> list[Any]:
        """A figure of every turn that has it."""
        return [report[name] for report in self.reports if report[name] is not None]

    def median(self, name: str) -> float | None:
        """Of the turns that have it; None if there is none."""
        values = self.each(name)
        return round(statistics.median(values), 4) if values else None

    @property
    def row(self) -> dict[str, Any]:
        """As it goes into the JSON."""
        return {"c": self.c, **{name: self.median(name) for name in ("output_tok_s", "ttft_ms_p50", "tpot_ms_p50")}}

    @property
    def client_share(self) -> float:
        """Of one processor, the most that the client took in a turn."""
        return max(report["client_cpu_s"] / report["wall_s"] for report in self.reports)


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


def climb(
    url: str, ladder: Ladder, concurrency: int, *, max_tokens: int, requests: int, turn: int = 0
) -> dict[str, Any]:
    """The report of one load. Raises RuntimeError if a request failed."""
    report = load_at(url, ladder, concurrency, max_tokens=max_tokens, requests=requests, turn=turn)
    if reason := verdict(report):
        raise RuntimeError(f"c={concurrency}: {reason}: {report['errors']}")
    return report


def load_at(
    url: str, ladder: Ladder, concurrency: int, *, max_tokens: int, requests: int, turn: int = 0
) -> dict[str, Any]:
    """The report, whatever became of the requests.

    Each turn has prompts of its own, of which the prefix cache knows nothing.
    """
    options = LoadOptions(
        url=url, concurrency=concurrency, requests=requests, chat=False, token_ids=ladder.vocab_size,
        prompt_tokens=ladder.prompt_tokens, max_tokens=max_tokens, ignore_eos=True,
        seed=1_000_000 * turn + 1000 * concurrency + max_tokens,
    )  # fmt: skip
    return make_report(uvloop.run(run_load(options)), options)


def measure(args: argparse.Namespace) -> tuple[list[Rung], dict[str, Any]]:
    """All rungs, and under what conditions."""
    ladder = LADDERS[args.geometry]
    device = {"ceilings": ceilings_apart()} if args.device == "cuda" else {}
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        flags = server_flags(ladder, Path(folder), args)
        with Served(flags, ready_s=_READY_S, log=args.log) as served:
            rungs = list(_rungs(served, ladder, args.concurrency, args.repeat))
    config = {
        "geometry": args.geometry, "device": args.device, "prompt_tokens": ladder.prompt_tokens,
        "output_tokens": ladder.max_tokens, "requests": "max(3, 2c)", "accept_length": args.accept_length,
        "spec_tokens": args.spec_tokens or ladder.num_drafts, "load_format": "dummy", "flags": args.flags,
        "start_s": round(served.start_s, 1), "peer": PEER, "peer_output_tok_s": dict(ladder.peer),
        "facts": facts(served.lines), "repeat": args.repeat, **device,
        "turns_output_tok_s": {rung.c: rung.each("output_tok_s") for rung in rungs},
        "accept_lengths": {rung.c: rung.median("accept_length") for rung in rungs},
        "client_cpu_shares": {rung.c: round(rung.client_share, 3) for rung in rungs},
    }  # fmt: skip
    return rungs, config


def _rungs(server: Served, ladder: Ladder, concurrency: Sequence[int], repeat: int) -> Iterator[Rung]:
    """Each is printed as it is done."""
    most = max(concurrency)
    # Not counted: what is compiled, or first allocated, by the first requests.
    climb(server.url, ladder, most, max_tokens=16, requests=most)
    for c in concurrency:
        load = {"max_tokens": ladder.max_tokens, "requests": max(3, 2 * c)}
        rung = Rung(c=c, reports=[climb(server.url, ladder, c, **load, turn=turn) for turn in range(repeat)])
        print(_line(rung, ladder), flush=True)
        yield rung


def without_serial(line: str) -> str:
    """A line of the memory plan without the number of one device among all."""
    return _SERIAL.sub("", line)


def facts(lines: list[str]) -> list[str]:
    """What the server says at start of its device, its kernels, its memory and MPS."""
    starts = (
        "target: device", "target: attention", "target: gated delta nets", "target: fp8", "device memory", "mps=",
        "plan: device",
    )  # fmt: skip
    messages = [line.rstrip().partition(" INFO ")[2] for line in lines]
    return [without_serial(message) for message in messages if message.startswith(starts)]


def _line(rung: Rung, ladder: Ladder) -> str:
    row, peer = rung.row, ladder.peer.get(rung.c)
    rate = row["output_tok_s"]
    return _COLUMNS.format(
        rung.c, f"{rate:.1f}", f"{peer:.1f}" if peer else "-", f"{rate / peer:.2f}" if peer else "-",
        *(f"{row[name]:.2f}" if row[name] else "-" for name in ("ttft_ms_p50", "tpot_ms_p50")),
        rung.median("accept_length") or "-", f"{rung.client_share:.2f}", sum(rung.each("completed")),
    )  # fmt: skip


def add_server_flags(parser: argparse.ArgumentParser, geometry: str) -> None:
    """Of every bench that starts such a server. geometry: the default."""
    parser.add_argument("--geometry", choices=LADDERS, default=geometry)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--accept-length", type=float, default=4.0, help="simulated, bonus token included")
    parser.add_argument("--spec-tokens", default="", help="k, or auto; the geometry's own by default")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what the newest server logs")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_flags(parser, "qwen3-8b-dflash")
    parser.add_argument(
        "--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8, 16, 32]
    )
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="turns of each rung, in the same server")
    add_plot_flags(parser)
    parser.add_argument("flags", nargs="*", help="more flags of python -m launch, after --", metavar="FLAG")
    args = parser.parse_args(argv)
    if args.repeat < 1:
        parser.error(f"--repeat must be at least 1, not {args.repeat}")
    check_plot_flags(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 if a request failed."""
    args = parse(argv)
    if args.source:
        plot(read_result(args.source), args.plot)
        return 0
    print(
        _COLUMNS.format("c", "out tok/s", "peer", "ratio", "TTFT ms p50", "TPOT ms p50", "accept", "client cpu", "done")
    )
    try:
        rungs, config = measure(args)
    except (AssertionError, RuntimeError) as error:  # the server did not start, or requests failed
        print(f"ladder: {error}", file=sys.stderr)
        return 1
    result = {"rows": [rung.row for rung in rungs], "config": config}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(result, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
