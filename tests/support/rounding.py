"""How far two tensors are apart, in units in the last place."""

import torch

_DIGITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


def ulps_apart(got: torch.Tensor, want: torch.Tensor, *, scale: torch.Tensor | float = 0.0) -> float:
    """The largest difference, each in units in the last place of want, or of `scale` where that is larger.

    scale: where a result is a difference of larger things, their size. NaN is infinitely far from anything.
    """
    assert got.dtype == want.dtype, f"{got.dtype} and {want.dtype}"
    assert got.shape == want.shape, f"{list(got.shape)} and {list(want.shape)}"
    wide, ref = got.detach().double().cpu(), want.detach().double().cpu()
    if not isinstance(scale, float):
        scale = scale.double().cpu()
    size = torch.maximum(ref.abs(), torch.as_tensor(scale, dtype=torch.float64)).clamp_min(1e-30)
    ulp = torch.exp2(torch.floor(torch.log2(size)) - _DIGITS[got.dtype])
    apart = ((wide - ref).abs() / ulp).nan_to_num(torch.inf)
    return float(apart.max()) if apart.numel() else 0.0


def rounds_alike(got: torch.Tensor, want: torch.Tensor, *, ulps: float, scale: torch.Tensor | float = 0.0) -> bool:
    """No further apart than `ulps`; and in bfloat16 hardly anywhere apart.

    Where intermediate values are rounded at the same points, float32's own differences seldom show in bfloat16; a
    rounding left out shows in a tenth of the values or more.
    """
    if ulps_apart(got, want, scale=scale) > ulps:
        return False
    return got.dtype != torch.bfloat16 or int((got != want).sum()) <= max(2, got.numel() // 50)
