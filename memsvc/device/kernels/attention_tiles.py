"""How attention kernels cut their work: tile sizes by shape, the number of chunks, and room for partial results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["TILES", "AttentionScratch", "Tile", "choose_tile", "num_multiprocessors", "padded_rows"]

MAX_ROWS = 128
"""Rows of a key-value head that one program holds at most; more are several programs, which read keys again."""

_INTERPRETED_PROCESSORS = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program of one shape works. What is best is measured: tests/bench/attention.py tries variants."""

    block: int
    """Positions of context it reads at a time."""
    num_warps: int
    num_stages: int
    """Tiles of keys and values in its shared memory; all but one of them are on their way at a time."""
    programs: int = 2
    """Programs a multiprocessor for which the context is cut: more balance better and add up more."""


TILES = {
    (16, 64): Tile(128, 4, 3, programs=3),
    (16, 128): Tile(64, 4, 3, programs=3),
    (16, 256): Tile(32, 4, 3, programs=2),
    (32, 64): Tile(128, 4, 3, programs=2),
    (32, 128): Tile(64, 4, 3, programs=2),
    (32, 256): Tile(32, 4, 3, programs=2),
    (64, 64): Tile(128, 4, 3, programs=2),
    (64, 128): Tile(64, 4, 3, programs=1),
    (64, 256): Tile(64, 8, 3, programs=1),
    (128, 64): Tile(128, 8, 3, programs=2),
    (128, 128): Tile(64, 8, 3, programs=2),
    (128, 256): Tile(32, 8, 3, programs=2),
}
"""(rows of a program, head_dim) -> tile, for 16-bit keys. Smaller sizes take the next larger entry.

(64, 128) and (64, 256) are measured: docs/benchmarks/attention-h200.json.
"""

_WIDE = Tile(16, 8, 2)
"""For float32 keys, and for head_dim above 256."""


def padded_rows(num_rows: int) -> tuple[int, int]:
    """(rows of a program, programs) for so many rows of a key-value head: a power of two that the matrix units take."""
    rows = 16
    while rows < min(num_rows, MAX_ROWS):
        rows *= 2
    return rows, -(-num_rows // rows)


def choose_tile(num_rows: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """The table's entry for num_rows rows a key-value head."""
    dim = next((dim for dim in (64, 128, 256) if head_dim <= dim), None)
    if dim is None or dtype.itemsize > 2:
        return _WIDE
    return TILES[padded_rows(num_rows)[0], dim]


def num_multiprocessors(device: torch.device | str) -> int:
    """Of a CUDA device; a small number where kernels are interpreted."""
    if torch.device(device).type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


class AttentionScratch:
    """Room for what chunks found before it is added up. One for all layers and buckets of a stream, of one row shape."""

    def __init__(
        self,
        num_places: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        max_splits: int,
        device: torch.device | str,
    ) -> None:
        """For batches of num_places requests of block_size rows whose contexts are cut in max_splits parts at most.

        Smaller batches may be cut in more: there are max_splits + num_places - 1 chunks for all requests together.
        """
        self.num_chunks = max_splits + num_places - 1
        self.num_places = num_places
        self.tile: Tile | None = None
        """Instead of the table's, to compare variants."""
        self._num_multiprocessors = num_multiprocessors(device)
        rows = (self.num_chunks, num_heads * block_size)
        self.partial = torch.empty((*rows, head_dim), dtype=torch.float32, device=device)
        self.tops = torch.empty(rows, dtype=torch.float32, device=device)
        self.totals = torch.empty(rows, dtype=torch.float32, device=device)
        self.plan = torch.zeros((num_places, 2), dtype=torch.int32, device=device)
        """First chunk and number of chunks of each place, written and read by the kernels."""

    @classmethod
    def for_buckets(
        cls,
        buckets: Sequence[int],
        block_size: int,
        heads: tuple[int, int],
        head_dim: int,
        device: torch.device | str,
    ) -> "AttentionScratch":
        """Enough for batches of any of the bucket sizes. heads: query heads and key-value heads."""
        num_rows = block_size * heads[0] // heads[1]
        units = heads[1] * padded_rows(num_rows)[1]
        most = max(tile.programs for tile in (*TILES.values(), _WIDE)) * num_multiprocessors(device)
        return cls(max(buckets), block_size, heads[0], head_dim, -(-most // units), device)

    def check(self, q: torch.Tensor) -> None:
        """Raises ValueError if there is no room for q [N, B, heads, d]."""
        n, block_size, num_heads, dim = q.shape
        form = (block_size * num_heads, dim)
        if n > self.num_places or self.partial.shape[1:] != form:
            raise ValueError(
                f"scratch for {self.num_places} requests of {list(self.partial.shape[1:])} can't serve {n} of {form}"
            )

    def splits(self, num_places: int, units: int, max_tiles: int, tile: Tile) -> int:
        """Parts that all contexts of a batch together are cut in.

        units: programs a chunk (key-value heads, and tiles of their rows). max_tiles: of the longest context allowed.
        Fixed when a graph is captured; how the parts lie is decided by the lengths when it runs.
        """
        # Not rounded up: of as many parts as requests each request is one, and there is nothing to add up.
        wanted = self._num_multiprocessors * tile.programs // units
        return max(1, min(wanted, num_places * (max_tiles + 1), self.num_chunks - num_places + 1))
