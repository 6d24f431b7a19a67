"""What the gated delta net of a verify step costs: `python -m tests.bench.delta` (on a CUDA device), JSON lines.

A layer's launch for each tile, and the launches that move states on for all layers of the 27B, captured many times
into a graph, on the memory of LAYERS layers in turn. floor_us: the bytes that have to be moved over the bandwidth that
a large copy reaches. Tiles are compiled first, by all cores.
"""

import argparse
import json
import os
import sys

import torch

from memsvc.device.kernels.delta_memory import move_states
from memsvc.device.kernels.delta_site import DeltaSite, DeltaTile
from memsvc.device.kernels.delta_verify import delta_verify
from tests.bench.delta_compile import compile_all
from tests.bench.rows import LAUNCHES, copy_bytes_per_us, graph_us
from tests.support import delta_models

LAYERS = 4
"""Together far more than a cache holds, from a few requests on."""
ALL_LAYERS = 48
"""Linear layers of the 27B."""
TILES = (
    "64x8x64x128,64x8,64x4,64x4x64x168,32x4,32x8x64x128,128x4,128x4x32,128x4x64x168,128x8,128x8x64x128,"
    "128x4x64x0-bf16x3,64x8x64x128-bf16x3"
)
"""Columns, warps, piece and registers (0: any) of each, as DeltaTile has them; after a - its precision."""


def tile_of(text: str) -> DeltaTile:
    """Of one entry of TILES."""
    sizes, _, precision = text.partition("-")
    given = [int(size) for size in sizes.split("x")]
    columns, num_warps, piece, registers = given + [64, 0][len(given) - 2 :]
    return DeltaTile(columns, num_warps, piece, registers or None, precision or None)


def sites_of(model: str, num_slots: int, tile: DeltaTile, device: str) -> list[DeltaSite]:
    """One for each of LAYERS layers."""
    spec = delta_models.MODELS[model]
    memory = delta_models.memory_of(spec, num_slots, LAYERS, device)
    conv = torch.randn(spec.conv_kernel, spec.conv_dim, device=device) * 0.3
    return [DeltaSite(memory=memory, layer=layer, conv=conv, tile=tile) for layer in range(LAYERS)]


def measure(model: str, num_slots: int, tile: DeltaTile, bandwidth: float, device: str = "cuda") -> dict[str, object]:
    """One launch with this tile."""
    spec, rows = delta_models.MODELS[model], delta_models.steady_rows(num_slots, device)
    raw, gates = delta_models.inputs_of(spec, rows.num_rows, device)
    sites = sites_of(model, num_slots, tile, device)
    us = graph_us([lambda i=i: delta_verify(raw, gates, rows, sites[i % LAYERS]) for i in range(LAUNCHES)])
    floor_us = delta_models.step_bytes(spec, rows) / bandwidth
    return {
        "model": model, "places": num_slots, "tile": tile, "device_us": round(us, 2), "floor_us": round(floor_us, 2),
    }  # fmt: skip


def measure_moves(num_slots: int, device: str = "cuda") -> dict[str, object]:
    """The end of a step. Lengths are put back each time, so that each moves what a step moves."""
    spec, rows = delta_models.MODELS["27b"], delta_models.steady_rows(num_slots, device)
    memory = delta_models.memory_of(spec, num_slots, ALL_LAYERS, device)
    first = memory.tables.state_len.clone()
    calls = [lambda: move_states(rows, memory), lambda: memory.tables.state_len.copy_(first)]
    both, reset = graph_us(calls * LAUNCHES), graph_us(calls[1:] * LAUNCHES)
    return {"moves": ALL_LAYERS, "places": num_slots, "device_us": round(2 * both - reset, 2)}


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="27b", choices=sorted(delta_models.MODELS))
    parser.add_argument("--places", default="1,4,16,32", help="numbers of requests")
    parser.add_argument("--tiles", default=TILES, help="columns and warps of each, or more: see TILES")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("tests.bench.delta needs a GPU: there is no CUDA device here", file=sys.stderr)
        return 2
    tiles = [tile_of(text) for text in arguments.tiles.split(",")]
    print(json.dumps(compile_all(arguments.model, tiles, os.cpu_count() or 1)), flush=True)
    bandwidth = copy_bytes_per_us()
    for places in map(int, arguments.places.split(",")):
        for tile in tiles:
            print(json.dumps(measure(arguments.model, places, tile, bandwidth)), flush=True)
        print(json.dumps(measure_moves(places)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
