"""How a product of few rows and a weight is cut into programs: the tunables of skinny_gemm, and what follows from them.

A unit is what one tile of the weight's rows makes of one tile of x's rows. Its way along K is cut into parts of
block_k. Tiled, `splits` programs share a unit; streamed, a fixed number of programs share the parts of all units,
each a run of them, wherever units begin and end. Both are the same arithmetic: program p has parts
[p * per, (p + 1) * per) in the order of units, and what a unit's programs find is added up in their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memsvc.device.kernels.launch import cut, padded

__all__ = ["MAX_SLABS", "Cut", "SkinnyPlan", "default_plan"]

MIN_ROWS, MAX_ROWS = 16, 128
"""Rows of x that one program has: as few as the matrix units take, and as many as the registers hold."""
MAX_SLABS = 32
"""Programs that may share a unit: whoever adds up asks for all of their results at once."""
MULTIPROCESSORS = 132
"""Of an H100 or H200."""


@dataclass(frozen=True, slots=True)
class SkinnyPlan:
    """How one product is computed. What is best is measured: python -m tests.bench.skinny tries variants."""

    block_n: int
    """Rows of the weight that a program has at a time; of a gated one, of either half. From 64 on (with whole
    groups of 4 warps) they go to the matrix units out of shared memory, below that through registers."""
    block_k: int
    """Columns of it read at a time: 64 are 128 bytes of a row."""
    splits: int = 1
    """Programs that share a unit along K."""
    streams: int = 0
    """Programs a multiprocessor of a streamed grid; 0: tiled."""
    num_warps: int = 4
    num_stages: int = 4
    """Tiles of weight and x in shared memory; all but one of them are on their way at a time."""
    tma: bool = False
    """Tiles are fetched by the copy engine, through tensor maps made on the host at launch, instead of by cp.async."""
    prefetch: int = 512
    """Columns of its first tile that a program has brought into the L2 cache while the kernel before still runs
    (launch.OVERLAP). 0: none."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What follows from a plan for m rows, n columns of the result and a width k."""

    rows: int
    """Of x a program."""
    row_tiles: int
    units: int
    parts: int
    """Of a unit; tiled, rounded up to whole programs."""
    per: int
    """Parts of a program."""
    programs: int
    slabs: int
    """Programs that share one unit, at most."""

    @classmethod
    def of(cls, plan: SkinnyPlan, sizes: Sequence[int], processors: int) -> "Cut":
        """sizes: (m, n, k). Raises ValueError if more programs would share a unit than can be added up."""
        m, n, k = sizes
        rows = min(max(padded(m), MIN_ROWS), MAX_ROWS)
        row_tiles, parts = cut(m, rows), cut(k, plan.block_k)
        units = row_tiles * cut(n, plan.block_n)
        if plan.streams:
            per = cut(units * parts, plan.streams * processors)
            programs = cut(units * parts, per)
            # A unit of so many parts may begin with the last one of a program. None is shared if programs end with one.
            slabs = 1 + cut(parts - 1, per) if parts % per or per % parts else cut(parts, per)
        else:
            per = cut(parts, plan.splits)
            slabs = cut(parts, per)
            parts, programs = slabs * per, units * slabs
        if slabs > MAX_SLABS:
            raise ValueError(f"{slabs} programs share a unit of {list(sizes)} under {plan}, at most {MAX_SLABS} can")
        return cls(rows, row_tiles, units, parts, per, programs, slabs)


def default_plan(m: int, n: int, k: int) -> SkinnyPlan:
    """A plan by reasoning, for shapes that were not measured: at least two programs a multiprocessor, full lines.

    n: columns of the result (of either half, if gated).
    """
    block_n, block_k, warps, stages = (64, 128, 4, 4) if m <= 32 else (64, 64, 4, 5) if m <= 64 else (128, 64, 8, 4)
    units = cut(n, block_n) * cut(m, MAX_ROWS)
    splits = min(cut(2 * MULTIPROCESSORS, units), cut(k, 4 * block_k), 8)
    return SkinnyPlan(block_n, block_k, splits=max(1, splits), num_warps=warps, num_stages=stages)
