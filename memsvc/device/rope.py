"""Rotary position embedding: wavelengths of each type, and the rotation itself."""

import math

import torch

from memsvc.device.cpu.kernels import kernels_for
from memsvc.device.hf_config import RopeSpec


def inverse_frequencies(rope: RopeSpec) -> tuple[torch.Tensor, float]:
    """float32 [rotary_dim / 2] radians per position, and the factor on cos and sin."""
    wavelength = rope.theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim)
    plain = 1.0 / wavelength
    match rope.rope_type:
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, wavelength), _yarn_attention_factor(rope)
        case _:
            return plain, 1.0


def _llama3(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths stretched, short ones kept, a linear blend between."""
    turn = 2 * math.pi / plain
    low, high = rope.trained_len / rope.low_freq_factor, rope.trained_len / rope.high_freq_factor
    blend = (rope.trained_len / turn - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(turn > low, plain / rope.factor, plain)
    return torch.where((turn <= low) & (turn >= high), mixed, stretched)


def _yarn(rope: RopeSpec, wavelength: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn often are kept, those that turn seldom are stretched, a ramp between."""

    def dim_of(rotations: float) -> float:
        turns = rope.trained_len / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * wavelength) * (1 - keep) + 1.0 / wavelength * keep


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class Rotary:
    """Turns the leading rotary_dim dimensions of heads, the two halves of them paired."""

    def __init__(self, rope: RopeSpec, device: torch.device | str = "cpu") -> None:
        frequencies, self.scale = inverse_frequencies(rope)
        self.frequencies = frequencies.to(device)
        self.rotary_dim = rope.rotary_dim

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin for positions int64 [n]: each [n, 1, rotary_dim] of dtype. Once a forward."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        cos = torch.cat((cos, cos), dim=-1)
        sin = torch.cat((-sin, sin), dim=-1)
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]

    def rotate(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x [n, heads, head_dim] turned by the tables of its n positions."""
        cos, sin = tables
        kernels = kernels_for(x)
        out = kernels.rotate(x, cos, sin) if kernels else None
        if out is not None:
            return out
        turned = x if self.rotary_dim == x.shape[-1] else x[..., : self.rotary_dim]
        # The sign of the swapped half sits in the table, which rounds the same as negating x.
        swapped = turned.roll(self.rotary_dim // 2, dims=-1)
        turned = swapped.mul_(sin).add_(turned * cos)
        if self.rotary_dim == x.shape[-1]:
            return turned
        return torch.cat((turned, x[..., self.rotary_dim :]), dim=-1)
