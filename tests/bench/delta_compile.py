"""All tiles of the delta net's kernel that its bench tries, compiled beforehand by many processes at once."""

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from memsvc.device.kernels.delta_site import DeltaTile
from tests.support import delta_models


def compile_tile(model: str, tile: DeltaTile) -> bool:
    """Compile it for Hopper into triton's cache, in this process; false if that fails."""
    from tests.support import compile_delta

    try:
        compile_delta.compile_tile(delta_models.MODELS[model], tile)
    except Exception as error:  # a finding for the bench, which tries it once more
        print(f"{model} {tile}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return False
    return True


def compile_all(model: str, tiles: Sequence[DeltaTile], processes: int) -> dict[str, Any]:
    """Compile in so many processes, of which none has kernels interpreted."""
    started = time.perf_counter()
    os.environ["TRITON_INTERPRET"] = "0"
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        made = [pool.submit(compile_tile, model, tile) for tile in tiles]
        kernels = sum(job.result() for job in made)
    return {"kernels": kernels, "compile_s": round(time.perf_counter() - started, 1)}
