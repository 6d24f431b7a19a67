"""A checkpoint's matrices in 8 bits, back in floats: codes times the scale of their row or block."""

import torch

from memsvc.device.int8 import dequantise_rows
from memsvc.device.quant_config import BLOCK

CODES = (torch.int8, torch.float8_e4m3fn)
"""dtypes of weights that have scales."""
_CHUNK_ROWS = 32 * BLOCK
"""Rows worked on at once: they are there in float32 then."""


def block_form(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of the scales of a matrix of that shape, blocks at its ends counted in full."""
    return tuple(-(-size // BLOCK) for size in shape)


def scaled(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes [out, in] times scales [out, 1] or one a block, multiplied in float32 and then converted."""
    if scales.shape == (len(codes), 1):
        return dequantise_rows(codes, scales, dtype)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for start in range(0, len(codes), _CHUNK_ROWS):
        part = codes[start : start + _CHUNK_ROWS].float()
        wide = scales[start // BLOCK : (start + len(part) + BLOCK - 1) // BLOCK].float()
        wide = wide.repeat_interleave(BLOCK, 0)[: len(part)].repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
        out[start : start + len(part)] = part.mul_(wide)
    return out
