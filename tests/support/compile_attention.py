"""`python -m tests.support.compile_attention`: what the attention kernels need on Hopper, a line of JSON for each."""

import json
from dataclasses import asdict
from typing import Any

from memsvc.device.kernels import block_attention, prefill_attention
from memsvc.device.kernels.attention_tiles import TILES, Tile
from tests.support.compiled_kernel import compile_kernel

KEYS = dict.fromkeys(("q", "k", "v", "k_pages", "v_pages", "sink", "out"), "*bf16")
TABLES = dict.fromkeys(("page_table", "members", "starts", "lengths", "plan", "tiles"), "*i32")
SUMS = dict.fromkeys(("partial", "tops", "totals"), "*fp32")
TYPES = KEYS | TABLES | SUMS | {"scale": "fp32"}


def block_case(num_rows: int, dim: int, tile: Tile, **changes: Any) -> tuple[Any, dict[str, Any], Tile]:
    """The kernel of chunks for blocks of 8 rows."""
    constants = {
        "B": 8, "GROUP": num_rows // 8, "KV_HEADS": 8, "DIM": dim, "PADDED": dim, "ROWS": num_rows, "ROW_TILES": 1,
        "OWN": 16, "PLACES": 64, "PAGE": 16, "BLOCK": tile.block, "WINDOW": 0, "CAUSAL": False, "HAS_SINK": False,
        "PRECISION": "tf32",
    }  # fmt: skip
    return block_attention._attend_chunks, constants | changes, tile


def cases() -> dict[str, tuple[Any, dict[str, Any], Tile]]:
    """Name -> kernel, constants and tile: entries of the tables, and every option once."""
    everything = {"WINDOW": 2048, "CAUSAL": True, "HAS_SINK": True, "PLACES": 1}
    merge = {"B": 9, "GROUP": 4, "KV_HEADS": 8, "DIM": 128, "PADDED": 128, "CHUNKS": 8}
    prefill = {
        "GROUP": 4, "KV_HEADS": 8, "DIM": 128, "PADDED": 128, "ROWS": 128, "PAGE": 16, "WINDOW": 0, "PRECISION": "tf32",
    }  # fmt: skip
    tile = prefill_attention.PREFILL_TILES[128]
    return {
        "32 rows of 64": block_case(32, 64, TILES[32, 64]),
        "64 rows of 128": block_case(64, 128, TILES[64, 128]),
        "64 rows of 256": block_case(64, 256, TILES[64, 256]),
        "64 rows of 128, all options": block_case(64, 128, TILES[64, 128], **everything),
        "merge": (block_attention._merge_chunks, merge, Tile(0, 1, 1)),
        "prefill": (prefill_attention._attend_spans, prefill | {"BLOCK": tile.block}, tile),
    }


def main() -> None:
    """Compile all."""
    for name, (kernel, constants, tile) in cases().items():
        loose = ("num_places", "num_splits", "table_stride")
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        usage = compile_kernel(kernel, TYPES, constants, unaligned=loose, **options)
        print(json.dumps({"kernel": name} | asdict(usage)), flush=True)


if __name__ == "__main__":
    main()
