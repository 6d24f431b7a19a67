"""Matrices in 8 bits: one symmetric scale a row."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""dtypes of weights and scales that are no codes of another format."""

_LOWEST, _HIGHEST = -128, 127
_CLIPS = (*(1.0 - 0.0025 * step for step in range(24)), 0.92, 0.9, 0.85, 0.8)
"""Shares of a row's largest magnitude that become 127, all tried. Normal rows of 64 to 2304 gain from few below 0.95."""
_CHUNK_ROWS = 4096
"""Rows worked on at once: the search holds several float32 copies of them."""


def quantise_rows(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [out, in] and scales [out, 1] in scale_dtype; of all clips tried a row has the least squared error.

    The scale is rounded to its dtype before the row is. Raises ValueError if a weight is not finite.
    """
    pairs = [_quantise(rows.float(), scale_dtype) for rows in weight.split(_CHUNK_ROWS)]
    return torch.cat([codes for codes, _ in pairs]), torch.cat([scales for _, scales in pairs])


def _quantise(rows: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    peak = rows.abs().amax(dim=1, keepdim=True)
    if not bool(peak.isfinite().all()):
        raise ValueError(f"{int((~peak.isfinite()).sum())} rows hold weights that are not finite")
    peak = peak.clamp_min(torch.finfo(torch.float32).tiny)
    best_codes = torch.empty_like(rows, dtype=torch.int8)
    best_scale = torch.empty_like(peak, dtype=scale_dtype)
    best_error = torch.full_like(peak, torch.inf)
    for clip in _CLIPS:
        scale = (peak * clip / _HIGHEST).to(scale_dtype).clamp_min(torch.finfo(scale_dtype).tiny)
        steps = rows / scale.float()
        codes = steps.round().clamp_(_LOWEST, _HIGHEST)
        # In shares of the peak: squares of weights themselves leave float32's range at 1e19.
        error = steps.sub_(codes).mul_(scale.float() / peak).square_().sum(dim=1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_codes = torch.where(better, codes.to(torch.int8), best_codes)
    return best_codes, best_scale


def dequantise_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes int8 [out, in] times scale [out, 1], multiplied in float32 and then converted.

    With a bf16 scale the product is exact in float32, so bf16 weights are the same in every engine.
    """
    return (codes.float() * scale.float()).to(dtype)
