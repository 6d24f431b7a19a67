"""One linear layer's delta rule over prompts, by each way to compute it: `python -m tests.bench.delta_prefill --json FILE`.

Rows of a table (CUDA): --tokens in all, in --sequences of about the same length, by fla-core's kernels, FlashInfer's
(as it chooses, whole sequences, pieces), and torch; where a rule can't be had, the row says why. device_us: between
events of a stream that is kept busy while the host enqueues, median. host_us: what a call takes the host. floors: bytes
that have to be moved over the bandwidth that a large copy reaches in this run, and multiplications of the recurrence
over what GEMMs reach. out_error, state_error: the largest difference from torch in float32, of numbers up to out_max
and state_max. PREFERRED of memsvc/device/delta_rules.py is decided by these figures, and PARTS_ROWS of flashinfer_delta.py
beside it. The file is written anew after every row.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memsvc.device.delta_plan import PlanRule
from memsvc.device.delta_rules import FlaRule, FlashInferRule, TorchRule, lacks
from memsvc.device.flashinfer_delta import BLOCK
from memsvc.device.gated_delta import DeltaRows
from target_worker.model.config import TargetShape
from target_worker.model.linear_spec import LinearSpec
from tests.bench.ladder_geometry import LADDERS
from tests.bench.propose_geometry import FLOPS_PER_S

RULES = ("fla", "torch", "flashinfer", "flashinfer-whole", "flashinfer-pieces")
"""The newest last: a kernel that reads where it must not leaves the figures of the others."""
DEVICE = torch.device("cuda")
NUM_PIECES = 2
"""Of a sequence, by flashinfer-pieces: so many have the device to themselves with 48 heads."""
REPEATS = 20
MOST_SECONDS = 2.0
"""For the repeats of one row, about."""
_CYCLES_PER_US = 2000
"""Of a clock no faster than this."""
_MOST_LEAD_US = 300_000.0
COLUMNS = (
    "tokens", "sequences", "rule", "device_us", "host_us", "bytes_us", "flops_us", "ratio", "out_error", "state_error",
)  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that one layer's rule over prompts can take."""

    num_bytes: int
    """Inputs of two bytes a number, gates and states of four, outputs of two: each once."""
    flops: int
    """Of the recurrence: what a key finds in the state, what replaces it, what a query reads."""

    @classmethod
    def of(cls, spec: LinearSpec, num_tokens: int, num_sequences: int) -> "Floor":
        """For so many tokens in all."""
        numbers = 2 * spec.num_k_heads * spec.k_dim + 2 * spec.value_size
        states = 2 * num_sequences * spec.value_size * spec.k_dim * 4
        return cls(
            num_bytes=num_tokens * (2 * numbers + 2 * spec.num_v_heads * 4) + states,
            flops=6 * num_tokens * spec.value_size * spec.k_dim,
        )

    def us(self, bytes_per_us: float) -> Row:
        """Both, as columns."""
        return {
            "bytes_us": round(self.num_bytes / bytes_per_us, 2),
            "flops_us": round(self.flops / FLOPS_PER_S * 1e6, 2),
        }


def lengths(num_tokens: int, num_sequences: int) -> list[int]:
    """Of sequences of num_tokens together, the first ones a token longer where it does not come out even."""
    each, more = divmod(num_tokens, num_sequences)
    return [each + (i < more) for i in range(num_sequences)]


def make_rule(name: str, spec: LinearSpec, lens: list[int], device: torch.device) -> PlanRule:
    """By a name of RULES, for models of bfloat16. Raises ValueError where it can't be had, and says why."""
    assert name in RULES, f"{name=} is not among {RULES}"
    library, _, form = name.partition("-")
    if reason := lacks(library, torch.bfloat16, device, spec):
        raise ValueError(f"{library}: {reason}")
    if library == "torch":
        return TorchRule()
    if library == "fla":
        return FlaRule(torch.bfloat16)
    longest = -(-max(lens) // (NUM_PIECES * BLOCK)) * BLOCK
    return FlashInferRule(device, spec.num_v_heads, piece={"": None, "whole": 0, "pieces": longest}[form])


def inputs(spec: LinearSpec, lens: list[int], device: torch.device) -> tuple[DeltaRows, torch.Tensor]:
    """Rows of bfloat16, some heads of which forget at once and others within thousands of rows, and states."""
    torch.manual_seed(0)
    num = sum(lens)
    q, k = (torch.randn(1, num, spec.num_k_heads, spec.k_dim, device=device) for _ in range(2))
    v = torch.randn(1, num, spec.num_v_heads, spec.v_dim, device=device)
    g, beta = (torch.rand(1, num, spec.num_v_heads, device=device) for _ in range(2))
    states = torch.randn(len(lens), spec.num_v_heads, spec.k_dim, spec.v_dim, device=device) * 0.3
    g = -g * torch.logspace(-3.5, 1.0, spec.num_v_heads, device=device)
    return DeltaRows(*(x.bfloat16() for x in (q, k, v)), g, beta), states


def as_dtype(rows: DeltaRows, dtype: torch.dtype) -> DeltaRows:
    """q, k and v in the form that a rule asks for."""
    return DeltaRows(*(x.to(dtype) for x in (rows.q, rows.k, rows.v)), rows.g, rows.beta)


def errors(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> Row:
    """The largest differences of outputs and states, and the largest numbers of what is wanted."""
    found: Row = {}
    for name, one, other in zip(("out", "state"), got, want, strict=True):
        found |= {
            f"{name}_error": _short(float((one.float() - other).abs().max())),
            f"{name}_max": _short(float(other.abs().max())),
        }
    return found


def _short(number: float) -> float:
    return float(f"{number:.3g}")


def times(call: Callable[[], object]) -> Row:
    """Of a call that has run before. The stream spins until the host has enqueued a turn."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    device_us: list[float] = []
    host_us: list[float] = []
    began, lead_us = time.perf_counter(), 20_000.0
    while len(device_us) < REPEATS and (len(device_us) < 3 or time.perf_counter() - began < MOST_SECONDS):
        torch.cuda._sleep(int(lead_us * _CYCLES_PER_US))
        begin.record()
        started = time.perf_counter()
        call()
        host_us.append((time.perf_counter() - started) * 1e6)
        end.record()
        end.synchronize()
        device_us.append(begin.elapsed_time(end) * 1e3)
        lead_us = min(2 * max(host_us[-3:]) + 500, _MOST_LEAD_US)
    return {"device_us": round(statistics.median(device_us), 1), "host_us": round(statistics.median(host_us), 1)}


def measure(
    name: str, spec: LinearSpec, lens: list[int], wanted: tuple[DeltaRows, torch.Tensor, list[torch.Tensor]]
) -> Row:
    """Times and errors of one rule. wanted: inputs, and what comes out by torch."""
    rows, states, want = wanted
    rule = make_rule(name, spec, lens, states.device)
    run = rule(lens, lambda array: torch.from_numpy(np.array(array)).to(states.device))
    own, scratch = as_dtype(rows, rule.dtype), states.clone()
    found = errors(run(own, scratch), want)
    # A rule may overwrite the state, with one that is as good to begin at.
    return times(lambda: run(own, scratch)) | found


def case(name: str, spec: LinearSpec, lens: list[int], wanted: Any, bytes_per_us: float) -> Row:
    """A row of the table; where there is no such rule, or it fails, why."""
    floor = Floor.of(spec, sum(lens), len(lens)).us(bytes_per_us)
    row: Row = {"tokens": sum(lens), "sequences": len(lens), "rule": name} | floor
    try:
        row |= measure(name, spec, lens, wanted)
    except (ValueError, RuntimeError, AssertionError, ImportError) as error:
        return row | {"failed": f"{type(error).__name__}: {error}"[:400]}
    return row | {"ratio": round(row["device_us"] / max(floor.values()), 2)}


def lines_of(rows: list[Row]) -> list[str]:
    """A short table."""
    lines = [" ".join(f"{name:>{_width(name)}}" for name in COLUMNS)]
    for row in rows:
        cells = " ".join(f"{row.get(name, '-')!s:>{_width(name)}}" for name in COLUMNS)
        lines.append(f"{cells}  {row['failed'].splitlines()[0]}" if "failed" in row else cells)
    return lines


def _width(name: str) -> int:
    return max(len(name), max(map(len, RULES)) if name == "rule" else 8)


def spec_of(geometry: str) -> LinearSpec | None:
    """Of the target's linear layers; None if it has none."""
    return TargetShape.from_json(LADDERS[geometry].target, {}).linear


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.delta_prefill", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    hybrids = [name for name in LADDERS if spec_of(name)]
    parser.add_argument("--geometry", choices=hybrids, default="qwen38-27b-dflash2")
    parser.add_argument("--tokens", type=_numbers, default=(512, 1024, 2048, 8192), help="of all sequences together")
    parser.add_argument("--sequences", type=_numbers, default=(1, 8))
    parser.add_argument("--rules", default=",".join(RULES), help="some of them, with commas")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    args.rules = args.rules.split(",")
    if unknown := sorted({*args.rules} - {*RULES}):
        parser.error(f"rules {unknown} are not among {', '.join(RULES)}")
    if max(args.sequences) > min(args.tokens):
        parser.error(f"{max(args.sequences)} sequences of {min(args.tokens)} tokens together: one would be empty")
    return args


def run(args: argparse.Namespace, save: Callable[[list[Row]], None]) -> list[Row]:
    """All rows, each saved with those before it."""
    from tests.bench.rows import copy_bytes_per_us

    spec, rows, bytes_per_us = spec_of(args.geometry), [], copy_bytes_per_us()
    assert spec is not None, args.geometry
    for num_tokens in args.tokens:
        for num_sequences in args.sequences:
            lens = lengths(num_tokens, num_sequences)
            given, states = inputs(spec, lens, DEVICE)
            plan = TorchRule()(lens, lambda array: torch.from_numpy(np.array(array)).to(DEVICE))
            wanted = given, states, list(plan(as_dtype(given, torch.float32), states.clone()))
            for name in args.rules:
                rows.append(case(name, spec, lens, wanted, bytes_per_us))
                save(rows)
    return rows


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 if something was not measured."""
    args = parse(argv)
    if not torch.cuda.is_available():
        print("tests.bench.delta_prefill finds no CUDA device: nothing was measured", file=sys.stderr)
        return 1
    facts = {"geometry": args.geometry, "device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def save(rows: list[Row]) -> None:
        if args.json:
            args.json.write_text(json.dumps({"rows": rows} | facts, indent=1) + "\n", encoding="utf-8")

    with torch.inference_mode():
        rows = run(args, save)
    print("\n".join(lines_of(rows)))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
