"""All variants of the block kernel that the attention bench tries, compiled beforehand by many processes at once."""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from memsvc.device.kernels.attention_tiles import AttentionScratch, Tile
from memsvc.device.kernels.block_attention import Context, block_attention
from tests.bench.attention_cases import GEOMETRIES, PAGE, Geometry

Job = tuple[str, int, Tile]
"""Name of a geometry, requests, tile."""


def compile_jobs(jobs: Sequence[Job]) -> int:
    """Compile these for Hopper into triton's cache, in this process. How many kernels there are."""
    from tests.support.kernel_compiler import compile_only

    with compile_only() as found:
        for name, num_reqs, tile in jobs:
            try:
                _launch(GEOMETRIES[name], num_reqs, tile)
            except Exception as error:  # a finding for the bench, which tries it once more
                print(f"{name} {num_reqs} {tile}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return len({kernel.cubin for kernel in found})


def compile_all(jobs: Sequence[Job], processes: int) -> dict[str, Any]:
    """Compile in so many processes, of which none has kernels interpreted."""
    started = time.perf_counter()
    os.environ["TRITON_INTERPRET"] = "0"
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        made = [pool.submit(compile_jobs, jobs[i::processes]) for i in range(processes)]
        kernels = sum(job.result() for job in made)
    return {"kernels": kernels, "compile_s": round(time.perf_counter() - started, 1)}


def _launch(geometry: Geometry, num_reqs: int, tile: Tile) -> None:
    """As attention_cases.triton_us launches it, over tensors that need hold nothing."""
    rows, max_pages = (num_reqs, geometry.num_rows), 256
    q, k, v = (
        torch.empty(*rows, heads, geometry.dim, dtype=torch.bfloat16)
        for heads in (geometry.num_heads, geometry.num_kv_heads, geometry.num_kv_heads)
    )
    arena = torch.empty((2, geometry.num_layers, 2, PAGE, geometry.num_kv_heads, geometry.dim), dtype=torch.bfloat16)
    table = torch.zeros((1 + num_reqs, max_pages), dtype=torch.int32)
    lengths = torch.zeros(len(table), dtype=torch.int32)
    context = Context(table, lengths[:num_reqs].clone(), torch.zeros_like(lengths), lengths)
    scratch = AttentionScratch(num_reqs, geometry.num_rows, geometry.num_heads, geometry.dim, 1100, "cpu")
    scratch.tile = tile
    block_attention(
        q, k, v, arena[:, 0, 0], arena[:, 0, 1], context, causal=geometry.causal, window=geometry.window,
        scratch=scratch, out=torch.empty_like(q),
    )  # fmt: skip


if __name__ == "__main__":
    # To see that all compiles: geometry, requests.
    from tests.bench.attention import variants

    shape = GEOMETRIES[sys.argv[1]]
    tiles = variants(*shape.row_shape)
    print(json.dumps(compile_all([(sys.argv[1], int(sys.argv[2]), tile) for tile in tiles], os.cpu_count() or 1)))
