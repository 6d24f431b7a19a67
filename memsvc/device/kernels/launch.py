"""How row kernels are launched: options that hold for all of them."""

from collections.abc import Sequence
from typing import Any


def launch(kernel: Any, grid: Sequence[int], warps: int, *operands: Any, **named: Any) -> None:
    """Launch a Triton kernel. Without programs nothing is launched."""
    if 0 not in grid:
        # No fused multiply-add: products are rounded on their own in the code that these kernels must agree with.
        kernel[tuple(grid)](*operands, **named, num_warps=warps, enable_fp_fusion=False)


def padded(n: int) -> int:
    """The power of two that holds n >= 1."""
    return 1 << (n - 1).bit_length()


def cut(n: int, size: int) -> int:
    """Programs of `size` that n takes."""
    return -(-n // size)
