"""Which size of drafter pays on a CPU: what its step costs, beside the accept length that it was trained to.

    OMP_WAIT_POLICY=PASSIVE python -m tests.bench.drafter_sizes speed --target MODEL --json > speed.json
    python -m tests.bench.drafter_sizes variants
    python -m tests.bench.drafter_sizes table --speed speed.json --runs RUNS --step 345

`speed` needs a quiet machine and no trained drafter: it makes each variant with random weights. `variants` prints a
name and flags a line; RUNS/NAME is to be the --state of `python -m draft_worker.train.fit` with those flags, all
other flags alike. `table` compares the variants at one step of their trainings, interpolated where there is no
estimate and never extrapolated; without --step at the last one that all have an estimate at. It prints Markdown, and
writes all of it to docs/benchmarks/drafter-sizes.json.

A step is a verify of the target and a draft step, one after the other, and gives as many tokens as the accept length
says, the target's own included. So tokens a second are accept length / (verify + draft step). Messages, scheduling and
text come on top of it, for all variants alike. Times are those of a greedy request; drawing tokens instead costs all
variants alike too.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draft_worker.train.config import DrafterConfig
from target_worker.model.config import TargetShape
from target_worker.train.flags import target_folder
from tests.bench.cpu_kernels import CONTEXT
from tests.bench.drafter_estimates import KINDS, Estimates, at_step, last_common_step, lengths_of, read_runs
from tests.bench.drafter_turns import ACCEPTED, measure, num_parameters, shape_of

OUT = Path("docs/benchmarks/drafter-sizes.json")
COLUMNS = (
    "layers", "taps", "rank", "draft_vocab", "parameters", "draft_ms", "accept_length_greedy", "accept_length_sampled",
    "tokens_per_s_greedy", "tokens_per_s_sampled",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A size. The defaults are the base, from which every other differs in one factor."""

    layers: int = 4
    num_taps: int = 4
    rank: int = 32
    draft_vocab: int = 16384
    """0 = the whole vocabulary."""

    def changed(self) -> dict[str, int]:
        """What differs from the base."""
        base = asdict(Variant())
        return {key: value for key, value in asdict(self).items() if value != base[key]}

    @property
    def name(self) -> str:
        """base, or the factor that differs."""
        return "-".join(f"{_flag(key)}-{value}" for key, value in self.changed().items()) or "base"

    @property
    def flags(self) -> str:
        """What train.fit is told."""
        return " ".join(f"--{_flag(key)} {value}" for key, value in asdict(self).items())

    @property
    def config(self) -> DrafterConfig:
        """What training makes of them."""
        return DrafterConfig(**asdict(self))


FACTORS = {
    "layers": (1, 2, 3, 6),
    "num_taps": (2, 6),
    "rank": (16, 64),
    "draft_vocab": (4096, 8192, 32768, 0),
}
VARIANTS = [Variant(), *(Variant(**{key: value}) for key, values in FACTORS.items() for value in values)]


def _flag(key: str) -> str:
    return key.replace("_", "-")


def tokens_per_s(accept_length: float, verify_ms: float, draft_ms: float) -> float:
    """What one request gets if nothing but verify and draft step takes time."""
    return 1000 * accept_length / (verify_ms + draft_ms)


def rows_of(speed: dict[str, Any], found: dict[str, Estimates], threads: int, step: int) -> Iterator[dict[str, Any]]:
    """A row for each variant that was trained and measured on so many threads."""
    times = {row["variant"]: row for row in speed["rows"] if row["threads"] == threads}
    verify_ms = speed["config"]["verify_ms"][str(threads)]
    for variant in VARIANTS:
        time, estimates = times.get(variant.name), found.get(variant.name)
        if time is None or estimates is None:
            print(f"{variant.name}: {'no times' if time is None else 'not trained'}, left out", file=sys.stderr)
            continue
        lengths, steps = _at_step(variant.name, estimates, step)
        speeds = {kind: tokens_per_s(length, verify_ms, time["draft_ms"]) for kind, length in lengths.items()}
        yield {
            "variant": variant.name, "layers": variant.layers, "taps": variant.num_taps, "rank": variant.rank,
            "draft_vocab": time["draft_vocab"], "parameters": time["parameters"], "draft_ms": time["draft_ms"],
            **{f"accept_length_{kind}": length for kind, length in lengths.items()},
            **{f"tokens_per_s_{kind}": round(value, 1) for kind, value in speeds.items()},
            "estimates_at": steps,
        }  # fmt: skip


def _at_step(name: str, estimates: Estimates, step: int) -> tuple[dict[str, float], list[int]]:
    try:
        return at_step(estimates, step)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table; the best of each speed is bold."""
    best = {f"tokens_per_s_{kind}": max(row[f"tokens_per_s_{kind}"] for row in rows) for kind in KINDS}
    lines = [_line([name.replace("_", " ") for name in COLUMNS]), "|---" * len(COLUMNS) + "|"]
    for row in rows:
        cells = [(_cell(key, row[key]), best.get(key) == row[key]) for key in COLUMNS]
        lines.append(_line([f"**{text}**" if is_best else text for text, is_best in cells]))
    return "\n".join(lines)


def estimates_markdown(made: dict[str, Any]) -> str:
    """Under what each row stands on: times by threads, the estimates at the step that all have one at, and the last."""
    speed, found = made["config"]["speed"], made["estimates"]
    common = last_common_step(found)
    times = {(row["variant"], row["threads"]): row["draft_ms"] for row in speed["rows"]}
    threads = sorted({num for _, num in times})
    head = ["variant", *(f"draft ms, {num} thread{'s'[: num > 1]}" for num in threads)]
    head += [*(f"{kind} at {common}" for kind in KINDS), "last step", *(f"{kind} there" for kind in KINDS)]
    lines = [_line(head), "|---" * len(head) + "|"]
    for name in (row["variant"] for row in made["rows"]):
        last = max(found[name])
        pairs = [[f"{length:.3f}" for length in lengths_of(found[name][step]).values()] for step in (common, last)]
        lines.append(_line([name, *(f"{times[name, num]:.2f}" for num in threads), *pairs[0], str(last), *pairs[1]]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(key: str, value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.1f}" if key.startswith("tokens_per_s") else f"{value:.2f}"


def report(speed: dict[str, Any], runs: Path, threads: int, step: int | None = None) -> dict[str, Any]:
    """What is written: rows, and under which conditions they hold. Raises ValueError if something is missing."""
    if str(threads) not in speed["config"]["verify_ms"]:
        raise ValueError(f"{threads} threads were not measured, only {', '.join(speed['config']['verify_ms'])}")
    found = read_runs(runs, [variant.name for variant in VARIANTS])
    wanted = last_common_step(found) if step is None else step
    return {
        "rows": list(rows_of(speed, found, threads, wanted)),
        "config": {
            "threads": threads,
            "verify_ms": speed["config"]["verify_ms"][str(threads)],
            "tokens_per_s": "accept length / (verify + draft step)",
            "step": wanted,
            "between_estimates": "linear in the logarithm of the step",
            "speed": speed,
        },
        "estimates": found,
    }


def speed_report(args: argparse.Namespace) -> dict[str, Any]:
    """Times of all variants, the target's verify, and the machine."""
    target = target_folder(args.target)
    shape = TargetShape.from_folder(target)
    wanted = [variant for variant in VARIANTS if not args.only or variant.name in args.only]
    sizes = {v.name: {"draft_vocab": v.draft_vocab or shape.vocab_size} for v in wanted}
    for variant in wanted:
        sizes[variant.name]["parameters"] = num_parameters(shape_of(variant.config, shape))
    rows = measure(target, {variant.name: variant.config for variant in wanted}, args.threads, args.rounds)
    verify = {num: [row["verify_ms"] for row in rows if row["threads"] == num] for num in args.threads}
    return {
        "config": {
            "target": target.name, "machine": machine(), "torch": torch.__version__, "dtype": "bfloat16",
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"), "context": CONTEXT, "features_written": ACCEPTED,
            "rounds": args.rounds, "verify_rows": 8,
            "verify_ms": {str(num): round(statistics.median(times), 3) for num, times in verify.items()},
        },
        "rows": [row | sizes[row["variant"]] for row in rows],
    }  # fmt: skip


def machine() -> str:
    """The CPU, as far as Linux tells."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {name}, {torch.backends.cpu.get_cpu_capability()}"


def numbers(text: str) -> tuple[int, ...]:
    """1,2"""
    return tuple(int(part) for part in text.split(","))


def options(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.drafter_sizes", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True)
    speed = verbs.add_parser("speed", help="measure the draft step of each variant on this CPU")
    speed.add_argument("--target", default="smollm2", help="Hugging Face folder, or smollm2 for the default model")
    speed.add_argument("--threads", type=numbers, default=(1, 2))
    speed.add_argument("--rounds", type=int, default=60)
    speed.add_argument("--only", nargs="+", choices=[variant.name for variant in VARIANTS], metavar="NAME")
    speed.add_argument("--json", action="store_true", help="print JSON instead of a table")
    verbs.add_parser("variants", help="print name and flags of each")
    table = verbs.add_parser("table", help="put times and accept lengths together")
    table.add_argument("--speed", type=Path, required=True, help="what `speed --json` printed")
    table.add_argument("--runs", type=Path, required=True, help="folder of NAME/train.jsonl")
    table.add_argument("--step", type=int, help="of the trainings; default: the last that all have an estimate at")
    table.add_argument("--threads", type=int, default=2)
    table.add_argument("--out", type=Path, default=OUT)
    table.add_argument("--json", action="store_true", help="print what is written instead of the table")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """One verb."""
    args = options(argv)
    if args.verb == "variants":
        print("\n".join(f"{variant.name} {variant.flags}" for variant in VARIANTS))
    elif args.verb == "speed":
        found = speed_report(args)
        if args.json:
            print(json.dumps(found, indent=1))
            return
        for row in found["rows"]:
            print("  ".join(f"{key}={value}" for key, value in row.items()))
    else:
        try:
            made = report(json.loads(args.speed.read_text("utf-8")), args.runs, args.threads, args.step)
        except ValueError as error:
            sys.exit(f"error: {error}")
        args.out.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
        print(json.dumps(made, indent=1) if args.json else f"{markdown(made['rows'])}\n\n{estimates_markdown(made)}")


if __name__ == "__main__":
    main(sys.argv[1:])
