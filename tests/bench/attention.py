"""Attention over pages on a GPU, all variants of the tile table and FlashInfer: `python -m tests.bench.attention`.

Times are graph replays of all layers of a geometry, medians in microseconds, over more keys and values than the L2
cache holds, beside the time in which those bytes could be read. --json FILE has the figures after every geometry;
they are where TILES of memsvc/device/kernels/attention_tiles.py and RULES of memsvc/device/attention_backends.py come
from (docs/benchmarks/attention-h200.json).

Variants are tried in two rounds: block, warps and stages first, then, for the best of them, the number of
programs, which needs no compiling.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

BLOCKS, WARPS, STAGES, PROGRAMS = (32, 64, 128), (4, 8), (2, 3, 4), (1, 2, 3, 4, 6)
_KEPT = 2
"""Variants of the first round that go on to the second."""
_SHARED_BYTES = 227 << 10
PREFILLS = {"one chunk": (1, 2048, 2048), "late chunk": (1, 2048, 16384), "short prompts": (8, 256, 256)}
"""name -> requests, tokens a request of this call, tokens with those before it."""


def variants(num_rows: int, dim: int) -> list[Any]:
    """Tiles that fit into shared memory, the table's first."""
    from memsvc.device.kernels.attention_tiles import Tile, choose_tile, padded_rows

    default = choose_tile(num_rows, dim, torch.bfloat16)
    rows = padded_rows(num_rows)[0]
    found = [default]
    for block, warps, stages in itertools.product(BLOCKS, WARPS, STAGES):
        shared = 2 * dim * (rows + 2 * block * stages)
        if shared <= _SHARED_BYTES and not (dim * block > 64 * 128 and warps == 4 and rows > 32):
            found.append(Tile(block, warps, stages, default.programs))
    return list(dict.fromkeys(found))


def compile_variants(args: argparse.Namespace) -> dict[str, Any]:
    """All tiles of all geometries, at the extremes of the concurrencies, by all cores at once."""
    from tests.bench.attention_cases import GEOMETRIES
    from tests.bench.attention_compile import compile_all

    jobs = [
        (name, num_reqs, tile)
        for name in args.geometry
        for num_reqs in {min(args.concurrency), 8, max(args.concurrency)}
        for tile in variants(*GEOMETRIES[name].row_shape)
    ]
    return compile_all(jobs, min(16, os.cpu_count() or 1))


def try_variants(loads: list[Any], rows: list[dict[str, Any]], name: str) -> None:
    """Both rounds over the loads of one geometry; a row for each variant and load."""
    from tests.bench.attention_cases import triton_us

    def attempt(tile: Any) -> float:
        """Mean ratio to the floor, over all loads."""
        ratios = []
        for load in loads:
            try:
                us = triton_us(load, tile)
            except Exception as error:
                # A variant may want more than the device has: that is a finding, not the end of the others.
                print(f"{tile}: {type(error).__name__}: {error}", file=sys.stderr)
                return float("inf")
            rows.append(row_of(name, load, "triton", us) | {"tile": asdict(tile)})
            ratios.append(us / load.floor_us)
        return sum(ratios) / len(ratios)

    tiles = variants(*loads[0].geometry.row_shape)
    best = sorted(tiles, key=attempt)[:_KEPT]
    for tile, programs in itertools.product(best, PROGRAMS):
        other = replace(tile, programs=programs)
        if other not in tiles:
            attempt(other)


def row_of(name: str, load: Any, backend: str, us: float) -> dict[str, Any]:
    """One figure."""
    return {
        "geometry": name,
        "concurrency": load.num_reqs,
        "context": load.context_len,
        "backend": backend,
        "layers": load.geometry.num_layers,
        "us": round(us, 1),
        "floor_us": round(load.floor_us, 1),
    }


def blocks(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Rows of block attention, of one geometry."""
    from tests.bench.attention_cases import GEOMETRIES, make_load, triton_us

    rows: list[dict[str, Any]] = []
    cases = list(itertools.product(args.concurrency, args.context))
    if args.tiles:
        # The extremes decide: few requests are bound by latency, many by bandwidth.
        chosen = [case for case in cases if case[0] in (min(args.concurrency), 8, max(args.concurrency))]
        try_variants([make_load(GEOMETRIES[name], *case) for case in chosen], rows, name)
    for case in cases:
        load = make_load(GEOMETRIES[name], *case)
        rows.append(row_of(name, load, "triton-table", triton_us(load, None)))
        rows += flashinfer_rows(name, load)
    return rows


def prefills(name: str) -> list[dict[str, Any]]:
    """Rows of prompt chunks, of one geometry. Their floor is of bytes; a long chunk is bound by arithmetic."""
    from tests.bench.attention_cases import GEOMETRIES, make_load, triton_prefill_us

    rows = []
    for chunk, (num_reqs, num_rows, end) in PREFILLS.items():
        load = make_load(replace(GEOMETRIES[name], num_rows=num_rows, causal=True), num_reqs, end)
        label = f"{name} {chunk}"
        rows.append(row_of(label, load, "triton-prefill", triton_prefill_us(load, None)))
        rows += flashinfer_rows(label, load)
    return rows


def flashinfer_rows(label: str, load: Any) -> list[dict[str, Any]]:
    """A row for each of FlashInfer's kernels that there is for the load."""
    from tests.bench.attention_cases import flashinfer_us

    rows = []
    for kernel in ("fa2", "fa3"):
        try:
            us = flashinfer_us(load, kernel)
        except Exception as error:
            # One kernel that fails is a finding, not the end of the others.
            print(f"{kernel} {label}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if us is not None:
            rows.append(row_of(label, load, f"flashinfer-{kernel}", us))
    return rows


def parts(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """All that is measured, in parts."""
    for name in args.geometry:
        yield blocks(args, name)
        if args.prefill:
            yield prefills(name)


def winners(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The quickest row of each geometry, concurrency and context, with the others' best beside it."""
    found = []
    shapes = dict.fromkeys((row["geometry"], row["concurrency"], row["context"]) for row in rows)
    for shape in shapes:
        mine = [row for row in rows if (row["geometry"], row["concurrency"], row["context"]) == shape]
        best = min(mine, key=lambda row: row["us"])
        by_backend = {
            backend: min(row["us"] for row in mine if row["backend"] == backend)
            for backend in dict.fromkeys(row["backend"] for row in mine)
        }
        found.append(best | {"ratio": round(best["us"] / best["floor_us"], 2), "by_backend": by_backend})
    return found


def print_head() -> None:
    """What the columns of print_table are."""
    print(f"{'geometry':24} {'c':>3} {'ctx':>6} {'floor':>8} {'best':>8} {'ratio':>6}  backends, us; winner")


def print_table(found: list[dict[str, Any]]) -> None:
    """A line a shape."""
    for row in found:
        others = " ".join(f"{name}={us:.0f}" for name, us in row["by_backend"].items())
        tile = row.get("tile")
        which = f"{row['backend']} {tuple(tile.values())}" if tile else row["backend"]
        print(f"{row['geometry']:24} {row['concurrency']:>3} {row['context']:>6} {row['floor_us']:>8.1f} "
              f"{row['us']:>8.1f} {row['ratio']:>6.2f}  {others}; {which}", flush=True)  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.attention", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--geometry", nargs="+", default=["draft-9", "draft-8", "verify-27b"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--context", nargs="+", type=int, default=[1300, 4096])
    parser.add_argument("--no-tiles", dest="tiles", action="store_false", help="the table's tiles only")
    parser.add_argument("--prefill", action="store_true", help="prompt chunks too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure so far, after each geometry")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("tests.bench.attention measures a GPU, and there is no CUDA device here: nothing was measured",
              file=sys.stderr)  # fmt: skip
        return 1
    compiled = compile_variants(args) if args.tiles else {}
    rows: list[dict[str, Any]] = []
    print_head()
    for part in parts(args):
        rows += part
        print_table(winners(part))
        if args.json:
            facts = {"device": torch.cuda.get_device_name()} | compiled
            args.json.write_text(json.dumps(facts | {"rows": rows, "winners": winners(rows)}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
