"""The target's CUDA work of a step in one process, without servers: verify by bucket, prompts, and their kernels.

    python -m tests.bench.target_steps --geometry qwen3-8b-dflash --prefill 1024,2048,8192 --kernels --json FILE

makes the step as target_worker/cuda/assembly.py does, with random weights and requests of --context tokens, and prints
device times beside floors, for the code as it is (base) and for each of --variants (tests/bench/variants.py has them).
A quarter of a hybrid's requests write their states in a verify, as in a server where each gets four tokens a step.
device_us is free of launch gaps: the stream is busy while the host enqueues. verify: whole graphs; the sections come
from split ones. prefill: whole prompts of the geometry's length, and one prompt of all tokens; rests: the last tokens of
one request's context. Each of them eagerly, and by a graph, which gives the first tokens too, where there is one.
apart: how far the features of a verify, or the logits of a prompt, are from base's; a graph's features from those of the
eager step. --kernels adds a table of kernels for each, taken after all times. The file is written anew after every
variant.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import triton

from tests.bench.ceilings import ceilings
from tests.bench.ladder_geometry import LADDERS
from tests.bench.target_bench import PROFILED, Bench
from tests.bench.target_floors import MEANING
from tests.bench.target_setup import Job, Setup
from tests.bench.target_turns import Row
from tests.bench.variants import BASE

VERIFY_COLUMNS = (
    "concurrency", "device_us", "verify_us", "head_us", "accept_us", "floor_us", "bound", "ratio", "host_us", "apart", "steady",
)  # fmt: skip
PREFILL_COLUMNS = (
    "tokens", "prompts", "start", "route", "device_us", "floor_us", "bound", "ratio", "host_us", "alone_us", "limit", "hidden", "apart",
)  # fmt: skip


def lines_of(rows: list[Row], step: str, columns: tuple[str, ...]) -> list[str]:
    """A short table of all rows of one kind of step."""
    found = [row for row in rows if row["step"] == step]
    if not found:
        return []
    width = max(len(row["variant"]) for row in found)
    lines = [f"{step:{width}} " + " ".join(f"{name:>{_width(name)}}" for name in columns)]
    for row in found:
        cells = " ".join(f"{_cell(row.get(name, '-')):>{_width(name)}}" for name in columns)
        lines.append(f"{row['variant']:{width}} {cells}")
    return lines


def _cell(value: Any) -> str:
    """Prompts as 8x1024."""
    return f"{len(value)}x{value[0]}" if isinstance(value, list) else str(value)


def _width(name: str) -> int:
    return max(8, len(name))


def _numbers(text: str) -> tuple[int, ...]:
    """1,2,4; nothing is none."""
    return tuple(int(part) for part in text.split(",") if part)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.target_steps", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--geometry", choices=LADDERS, default="qwen3-8b-dflash")
    parser.add_argument("--concurrency", type=_numbers, default=(1, 4, 8, 16, 32))
    parser.add_argument("--context", type=int, default=1300, help="tokens of each request to verify")
    parser.add_argument("--prefill", type=_numbers, default=(), help="prompt tokens of a step, several with commas")
    parser.add_argument("--rests", type=_numbers, default=(), help="tokens behind a prefix that is there, likewise")
    parser.add_argument("--kernels", action="store_true", help="tables of kernels too")
    parser.add_argument("--variants", nargs="+", default=[], metavar="NAME[=VALUE][+...]", help="beside base")
    parser.add_argument("--accept-length", type=float, default=4.0, help="simulated; 0 accepts drafts that are right")
    parser.add_argument("--attention-backend", default="auto", help="of prompts")
    parser.add_argument("--device", default="cuda", help="cpu interprets: TRITON_INTERPRET=1 and a tiny geometry")
    parser.add_argument("--repeats", type=int, default=30, help="of a verify")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="nothing is begun after so long")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if not args.concurrency:
        parser.error("--concurrency is empty")
    if any(num >= args.context for num in args.rests):
        parser.error(f"--rests are parts of --context, which is {args.context}")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.exit(1, "tests.bench.target_steps finds no CUDA device: nothing was measured\n")
    return args


def run(args: argparse.Namespace, config: dict[str, Any]) -> Bench:
    """Everything, as far as it goes."""
    ladder = LADDERS[args.geometry]
    job = Job(
        name=args.geometry, ladder=ladder, concurrency=args.concurrency, context=args.context, prefill=args.prefill,
        rests=args.rests,
        accept_length=args.accept_length, attention_backend=args.attention_backend, device=args.device,
    )  # fmt: skip

    def save(bench: Bench) -> None:
        if args.json:
            found = {"rows": bench.rows, "kernels": bench.kernels, "config": config | bench.facts}
            args.json.write_text(json.dumps(found | {"failures": bench.failures}, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        bench = Bench(Setup(job, Path(folder)), repeats=args.repeats, seconds=args.seconds, save=save)
        try:
            if args.device != "cpu":
                bench.note("ceilings", ceilings)
            for text in dict.fromkeys((BASE, *args.variants)):
                bench.measure_named(text)
            if args.kernels:
                bench.profile()
        except RuntimeError as error:
            bench.failures.append(
                {"variant": "all that was left", "what": "device or profiler", "why": str(error)[:500]}
            )
        save(bench)
    return bench


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels give what they give on a device, and one load of theirs may read several tensors, as of a ring and a block."""
    import pytest

    from tests.support.kernel_bounds import allow_several_operands
    from tests.support.kernels import mend_interpreter

    mend_interpreter()
    with pytest.MonkeyPatch.context() as patches:
        allow_several_operands(patches)
        yield


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 if something was not measured."""
    args = parse(argv)
    is_cuda = args.device != "cpu"
    config = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(args).items() if name not in ("json", "seconds")
    } | {
        "device_name": torch.cuda.get_device_name() if is_cuda else "cpu", "torch": torch.__version__,
        "triton": triton.__version__, "floor": MEANING, "profiled": PROFILED,
    }  # fmt: skip
    with nullcontext() if is_cuda else interpreted():
        bench = run(args, config)
    for line in (*lines_of(bench.rows, "verify", VERIFY_COLUMNS), *lines_of(bench.rows, "prefill", PREFILL_COLUMNS)):
        print(line)
    for failure in bench.failures:
        print(f"not measured: {failure}")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
