"""The next GEMM's weight on its way into the L2 cache, asked for by the small kernel that runs before it.

A step of few rows is bound by reading weights, and between two GEMMs, while rows are normed, turned or attended, the
memory would stand idle. So each kernel there asks for what comes next before it does its own work. Nothing waits for
it, no value depends on it, and a weight that is not there yet is read as if nobody had asked.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

BYTES = 16 << 20
"""Of a weight that are asked for at most. An H200 has 50 MB of L2. Read when a kernel is launched; 0 is none."""
PIECE = tl.constexpr(4096)
"""Bytes that one thread asks for at a time."""


def operands(weight: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """(weight, bytes) for a kernel that calls `fetch_ahead`; (None, 0) if there is nothing to ask for."""
    if weight is None or weight.device.type != "cuda" or not weight.is_contiguous():
        return None, 0
    num_bytes = min(BYTES, weight.nbytes) // PIECE.value * PIECE.value
    return (weight, num_bytes) if num_bytes else (None, 0)


@triton.jit
def fetch_ahead(weight, num_bytes):
    """Ask for the first num_bytes of weight, shared out to all programs of the launch. With None nothing happens."""
    if weight is not None:
        THREADS: tl.constexpr = num_threads()
        ITEM: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        num_pieces = num_bytes // PIECE
        for first in range(program * THREADS, num_pieces, programs * THREADS):
            # Threads past the end ask for the last piece once more.
            pieces = tl.minimum(first + tl.arange(0, THREADS), num_pieces - 1)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; // $0", "=r,l,r",
                [weight + pieces.to(tl.int64) * (PIECE // ITEM), tl.zeros([THREADS], tl.int32) + PIECE],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
