"""How row kernels are launched: options that hold for all of them, and their overlap with the kernel before."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAP = False
"""Programmatic dependent launch: a kernel's programs are set up while the kernel before it in the stream ends, and
wait for its results inside. Only what no earlier kernel of a step writes, weights, is read before that. Works in
CUDA graphs; kernels of others around them (GEMMs) stay as they are. Set before the first launch."""


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """From here on everything the kernels before have written can be read, and what they read be overwritten."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def launch(kernel: Any, grid: Sequence[int], warps: int, *operands: Any, **named: Any) -> None:
    """Launch a Triton kernel whose last parameter is OVERLAP. Without programs nothing is launched."""
    if 0 in grid:
        return
    # No fused multiply-add: products are rounded on their own in the code that these kernels must agree with.
    kernel[tuple(grid)](
        *operands, **named, OVERLAP=OVERLAP, num_warps=warps, launch_pdl=OVERLAP, enable_fp_fusion=False
    )


def launch_serial(kernel: Any, grid: Sequence[int], warps: int, *operands: Any, **named: Any) -> None:
    """The same for a kernel without that parameter: it begins when the kernel before it has ended."""
    if 0 not in grid:
        kernel[tuple(grid)](*operands, **named, num_warps=warps, enable_fp_fusion=False)


def padded(n: int) -> int:
    """The power of two that holds n >= 1."""
    return 1 << (n - 1).bit_length()


def cut(n: int, size: int) -> int:
    """Programs of `size` that n takes."""
    return -(-n // size)
