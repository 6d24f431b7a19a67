"""Products of few rows, all variants of skinny_gemm against cuBLAS: `python -m tests.bench.skinny --json`, on a GPU.

Each product runs with what follows it (gate, residual sum and norm), many times in one CUDA graph, over more weights
than the L2 cache holds: device_us is one of them, floor_us the bytes it has to move over the bandwidth that a large
copy reaches in the same run. The winners are printed as the lines of memsvc/device/linear_table.py, and what a step
of each model would take with cuBLAS, with the winners, and at the floor.
Kernels are compiled first, by as many processes as there are cores. `--compile` does only that, and needs no GPU.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from memsvc.device.kernels import launch, skinny_gemm
from memsvc.device.kernels.skinny_tiles import MULTIPROCESSORS, SkinnyPlan
from tests.bench.skinny_cases import MODELS, PRODUCTS, ROWS, SEARCHED, Operands, Product, variants

CALLS = 12
"""Of one product in a graph, at least."""
TOLERANCE = 2e-2
"""Relative error to cuBLAS above which a variant is wrong: bfloat16 on both sides, and the norm after it."""
MARGIN = 0.98
"""Of cuBLAS's time that a variant may take to be preferred."""
KEPT = 3
"""Variants that are tried at the other numbers of rows of a tile."""
Row = dict[str, Any]


def compile_share(index: int, total: int, overlap: bool) -> int:
    """Compile every total-th variant for Hopper into triton's cache, from the index-th on. How many were new here."""
    from tests.support.kernel_compiler import compile_only

    launch.OVERLAP = overlap
    # A plan's cut follows the device; here there is none.
    skinny_gemm.num_multiprocessors = lambda device: MULTIPROCESSORS
    jobs = [(p, m, plan) for p in PRODUCTS for m in sorted(set(SEARCHED.values())) for plan in variants(p, m)]
    operands = {product: Operands(product, "cpu") for product in PRODUCTS}
    with compile_only() as found:
        for product, m, plan in jobs[index::total]:
            made = operands[product]
            made.run(plan, made.fill(m, product.k), made.epilogue(m))
    return len({kernel.cubin for kernel in found})


def compile_all(overlap: bool, processes: int) -> Row:
    """Compile in so many processes, of which none has kernels interpreted."""
    started = time.perf_counter()
    os.environ["TRITON_INTERPRET"] = "0"
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_share, i, processes, overlap) for i in range(processes)]
        kernels = sum(job.result() for job in jobs)
    return {"kernels": kernels, "compile_s": round(time.perf_counter() - started, 1)}


class Bench:
    """Figures of one run."""

    def __init__(self, bandwidth: float) -> None:
        """bandwidth: bytes a microsecond."""
        self.bandwidth = bandwidth
        self.rows: list[Row] = []
        self.failures: list[Row] = []

    def product(self, product: Product, numbers: list[int]) -> None:
        """All numbers of rows of one product."""
        operands = Operands(product, "cuda")
        best: dict[int, list[SkinnyPlan]] = {}
        for m in sorted(set(numbers) | {SEARCHED[m] for m in numbers}, key=lambda m: m != SEARCHED[m]):
            plans = best.get(SEARCHED[m]) or variants(product, m)
            timed = [(us, plan) for plan in plans if (us := self.measure(operands, m, plan)) is not None]
            best.setdefault(m, [plan for _, plan in sorted(timed, key=lambda one: one[0])[:KEPT]])
            self.measure(operands, m, None)
            torch.cuda.empty_cache()

    def measure(self, operands: Operands, m: int, plan: SkinnyPlan | None) -> float | None:
        """Microseconds of one, or None if it is wrong or does not run."""
        from tests.bench.rows import graph_us

        product = operands.product
        x, epilogue = operands.fill(m, product.k), operands.epilogue(m)
        case = {"n": product.n, "k": product.k, "ending": product.ending, "rows": m}
        try:
            if plan is not None and (apart := self.error(operands, x, plan)) > TOLERANCE:
                self.failures.append(case | {"plan": asdict(plan), "why": f"relative error {apart:.3g}"})
                return None
            calls = max(CALLS, len(operands.layers)) if product.n * product.k < 1 << 28 else 4
            us = graph_us([lambda turn=i: operands.run(plan, x, epilogue, turn) for i in range(calls)])
        except Exception as error:
            # A variant may want more than the device has: a finding, not the end of the others.
            self.failures.append(
                case | {"plan": plan and asdict(plan), "why": f"{type(error).__name__}: {error}"[:300]}
            )
            return None
        floor = product.num_bytes(m) / self.bandwidth
        self.rows.append(
            case
            | {
                "plan": plan and asdict(plan),
                "device_us": round(us, 2),
                "floor_us": round(floor, 2),
                "ratio": round(us / floor, 3),
            }
        )
        return us

    def error(self, operands: Operands, x: torch.Tensor, plan: SkinnyPlan) -> float:
        """Relative to cuBLAS, over all of the result; unwritten values are NaN, which passes nothing."""
        torch.manual_seed(1)
        want = operands.run(None, x, operands.epilogue(len(x))).float()
        torch.manual_seed(1)
        epilogue = operands.epilogue(len(x))
        # The result is likely to get this memory, or that of an earlier one, which would be right already.
        for _ in range(2):
            torch.full_like(want, torch.nan, dtype=x.dtype)
        got = operands.run(plan, x, epilogue).float()
        apart = float((got - want).norm() / want.norm())
        return apart if apart == apart else float("inf")


def winner(rows: list[Row], product: Product, m: int) -> tuple[Row, Row]:
    """(the best, cuBLAS) of one product and number of rows; the best is cuBLAS unless another is clearly quicker."""
    mine = [row for row in rows if (row["ending"], row["n"], row["k"]) == product.key and row["rows"] == m]
    cublas = next(row for row in mine if row["plan"] is None)
    best = min(mine, key=lambda row: row["device_us"])
    return (best if best["device_us"] < MARGIN * cublas["device_us"] else cublas), cublas


def table(rows: list[Row], numbers: list[int]) -> list[str]:
    """Lines of linear_table.CHOICES. cuBLAS's own are there where a variant wins at more rows."""
    lines = []
    for product in PRODUCTS:
        found = [(m, winner(rows, product, m)[0]["plan"]) for m in sorted(numbers)]
        while found and found[-1][1] is None:
            found.pop()
        if found:
            entries = ", ".join(f"({m}, {None if plan is None else SkinnyPlan(**plan)})" for m, plan in found)
            lines.append(f"    {product.key}: ({entries},),")
    return lines


def steps(rows: list[Row], numbers: list[int]) -> list[Row]:
    """All products of a step of each model."""
    found = []
    for (name, model), m in ((one, m) for one in MODELS.items() for m in sorted(numbers)):
        pairs = [(times, *winner(rows, product, m)) for times, product in model.products.values()]
        sums = {
            "cublas_us": sum(times * cublas["device_us"] for times, _, cublas in pairs),
            "best_us": sum(times * best["device_us"] for times, best, _ in pairs),
            "floor_us": sum(times * best["floor_us"] for times, best, _ in pairs),
        }
        found.append({"step": name, "rows": m} | {key: round(us, 1) for key, us in sums.items()})
    return found


def measure(numbers: list[int]) -> Row:
    """All products."""
    from tests.bench.rows import copy_bytes_per_us

    started = time.perf_counter()
    bench = Bench(copy_bytes_per_us())
    for product in PRODUCTS:
        bench.product(product, numbers)
        torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "copy_gb_s": round(bench.bandwidth / 1e3),
        "overlap": launch.OVERLAP,
        "measure_s": round(time.perf_counter() - started, 1),
        "rows": bench.rows,
        "failures": bench.failures,
        "table": table(bench.rows, numbers),
        "steps": steps(bench.rows, numbers),
    }


def show(result: Row, numbers: list[int]) -> None:
    """Winners, steps, and the table."""
    print(f"{'product':24} {'rows':>4} {'floor':>8} {'cublas':>8} {'best':>8} {'ratio':>6}  plan")
    for product in PRODUCTS:
        for m in sorted(numbers):
            best, cublas = winner(result["rows"], product, m)
            name = f"{product.n}x{product.k} {product.ending}"
            which = "cublas" if best["plan"] is None else SkinnyPlan(**best["plan"])
            print(f"{name:24} {m:>4} {best['floor_us']:>8.1f} {cublas['device_us']:>8.1f} {best['device_us']:>8.1f} "
                  f"{best['ratio']:>6.2f}  {which}")  # fmt: skip
    for step in result["steps"]:
        print(step)
    for failure in result["failures"]:
        print("failed:", failure)
    print("CHOICES: Choices = {", *result["table"], "}", sep="\n")
    print({key: value for key, value in result.items() if not isinstance(value, list)})


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), choices=ROWS)
    parser.add_argument("--overlap", action="store_true", help="let each kernel begin while the one before ends")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1), help="that compile")
    parser.add_argument("--compile", action="store_true", help="compile for Hopper and measure nothing")
    parser.add_argument("--json", action="store_true", help="every figure as one line of JSON, before the tables")
    arguments = parser.parse_args()
    if not arguments.compile and not torch.cuda.is_available():
        print("tests.bench.skinny needs a GPU: there is no CUDA device here (--compile works without)", file=sys.stderr)
        return 2
    launch.OVERLAP = arguments.overlap
    compiled = compile_all(arguments.overlap, arguments.processes)
    if arguments.compile:
        print(json.dumps(compiled))
        return 0
    result = compiled | measure(arguments.rows)
    if arguments.json:
        print(json.dumps(result))
    show(result, arguments.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
