"""DFlash2's local convolution around a sublayer: its input, and its output with the residual sum and the next norm.

The projection that makes the taps which depend on the row is a GEMM of the caller's, done once for both sides. Taps
are never stored: each kernel adds base and dynamic taps as it goes, rounded as draft_worker.conv rounds them.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.launch import cut, launch, padded
from memsvc.device.kernels.norm import MAX_WIDTH, rounded, scaled_norm
from memsvc.device.layers import RMSNorm

ELEMENTS, WARPS = 1024, 4
"""Of one program that convolves part of a row: padded elements, and warps."""

ROW_WARPS = {1024: 4, 2048: 4, 4096: 8, 8192: 8, 16384: 16}
"""Padded width -> warps of a program that has a whole row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvTaps:
    """The taps of all rows of a batch, of both sides."""

    base: torch.Tensor
    """[2 (input, output), S, H], contiguous"""
    dynamic: torch.Tensor
    """[N * B, 2 * S * G], contiguous: projection of the sublayer's input."""
    block_size: int
    """B"""

    @property
    def sizes(self) -> dict[str, int]:
        """B, S, G groups, GROUP channels each, padded to GROUP_PAD."""
        num_taps, width = self.base.shape[1:]
        num_groups = self.dynamic.shape[1] // (2 * num_taps)
        group = width // num_groups
        assert group * num_groups == width, f"{width} channels in {num_groups} groups"
        assert self.base.is_contiguous(), f"strides of base {self.base.stride()}"
        assert self.dynamic.is_contiguous(), f"strides of dynamic {self.dynamic.stride()}"
        pad = padded(group)
        return {"B": self.block_size, "S": num_taps, "G": num_groups, "GROUP": group, "GROUP_PAD": pad}


@triton.jit
def _convolve(x, base, dynamic, row, step, groups, SIDE: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
              GROUP: tl.constexpr, GROUP_PAD: tl.constexpr):  # fmt: skip
    """Groups [g] of a row of x as draft_worker.conv.finish has them: float32 [g, GROUP_PAD], rounded to x's type."""
    lanes = tl.arange(0, GROUP_PAD)
    at = groups[:, None] * GROUP + lanes[None, :]
    here = (groups < G)[:, None]
    seen = here & (lanes < GROUP)[None, :]
    out = tl.zeros([groups.shape[0], GROUP_PAD], tl.float32)
    for tap in tl.static_range(S):
        static = tl.load(base + (SIDE * S + tap) * (G * GROUP) + at, mask=seen, other=0.0).to(tl.float32)
        at_row = row * (2 * S * G) + (SIDE * S + tap) * G
        moving = tl.load(dynamic + at_row + groups, mask=groups < G, other=0.0).to(tl.float32)
        weight = rounded(static + moving[:, None], dynamic)
        value = tl.load(x + (row - tap) * (G * GROUP) + at, mask=seen & (step >= tap), other=0.0).to(tl.float32)
        out = tl.where(step >= tap, rounded(out + weight * value, x), out)
    return out


@triton.jit
def _conv(x, base, dynamic, out, SIDE: tl.constexpr, B: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
          GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    step, row = tl.program_id(0) % B, tl.program_id(0).to(tl.int64)
    groups, lanes = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK), tl.arange(0, GROUP_PAD)
    value = _convolve(x, base, dynamic, row, step, groups, SIDE, S, G, GROUP, GROUP_PAD)
    seen = (groups < G)[:, None] & (lanes < GROUP)[None, :]
    at = row * (G * GROUP) + groups[:, None] * GROUP + lanes[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=seen)


@triton.jit
def _conv_add_norm(x, base, dynamic, residual, weight, out, eps, SKIP: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
                   G: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    WIDTH: tl.constexpr = G * GROUP
    step = tl.program_id(0) % (B - SKIP) + SKIP
    row = (tl.program_id(0) // (B - SKIP) * B + step).to(tl.int64)
    groups, lanes = tl.arange(0, CHUNK), tl.arange(0, GROUP_PAD)
    seen = (groups < G)[:, None] & (lanes < GROUP)[None, :]
    at = groups[:, None] * GROUP + lanes[None, :]
    scale = tl.load(weight + at, mask=seen, other=0.0).to(tl.float32)
    value = _convolve(x, base, dynamic, row, step, groups, 1, S, G, GROUP, GROUP_PAD)
    value += tl.load(residual + row * WIDTH + at, mask=seen, other=0.0).to(tl.float32)
    value = rounded(value, residual)
    tl.store(residual + row * WIDTH + at, value.to(residual.dtype.element_ty), mask=seen)
    mean_square = tl.sum(tl.sum(value * value, 1), 0) / WIDTH
    value = scaled_norm(value, mean_square, scale, out, eps, False)
    out_row = tl.program_id(0).to(tl.int64) * WIDTH
    tl.store(out + out_row + at, value.to(out.dtype.element_ty), mask=seen)


def conv_prepare(u: torch.Tensor, taps: ConvTaps) -> torch.Tensor:
    """The sublayer's input u [N * B, H] convolved: LocalConv.prepare, without its taps."""
    return _launch(u, taps, 0)


def conv_finish(y: torch.Tensor, taps: ConvTaps) -> torch.Tensor:
    """The sublayer's output y [N * B, H] convolved, with the taps that its input made."""
    return _launch(y, taps, 1)


def conv_finish_add_rms_norm(
    y: torch.Tensor, taps: ConvTaps, residual: torch.Tensor, norm: RMSNorm, skip: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """conv_finish, then the residual sum and its plain norm: (normed, residual), as norm.add_rms_norm has them.

    skip: the first rows of each block which are left out; normed is then [N * (B - skip), H] of the others, and the
    residual of those left out stays as it was. For the last norm, where row 0 wants no logits.
    """
    sizes = taps.sizes
    width = _check(y, taps)
    assert residual.shape == y.shape, f"y is {list(y.shape)}, the residual {list(residual.shape)}"
    assert residual.is_contiguous(), f"strides of the residual {residual.stride()}"
    num_rows = len(y) // taps.block_size * (taps.block_size - skip)
    out = torch.empty((num_rows, width), dtype=y.dtype, device=y.device)
    chunk = padded(sizes["G"])
    held = chunk * sizes["GROUP_PAD"]
    if held > MAX_WIDTH:
        raise ValueError(f"{sizes['G']} groups of {sizes['GROUP']} channels, padded, are more than {MAX_WIDTH}")
    launch(
        _conv_add_norm, (num_rows,), ROW_WARPS[max(held, min(ROW_WARPS))], y, taps.base, taps.dynamic, residual,
        norm.weight, out, norm.eps, SKIP=skip, **sizes, CHUNK=chunk,
    )  # fmt: skip
    return out, residual


def _launch(x: torch.Tensor, taps: ConvTaps, side: int) -> torch.Tensor:
    _check(x, taps)
    sizes = taps.sizes
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    chunk = max(1, min(padded(sizes["G"]), ELEMENTS // sizes["GROUP_PAD"]))
    grid = len(x), cut(sizes["G"], chunk)
    launch(_conv, grid, WARPS, x, taps.base, taps.dynamic, out, SIDE=side, **sizes, CHUNK=chunk)
    return out


def _check(x: torch.Tensor, taps: ConvTaps) -> int:
    """Width of x's rows, contiguous and as many as there are taps."""
    assert x.is_contiguous(), f"strides {x.stride()}"
    assert len(x) == len(taps.dynamic), f"{len(x)} rows, taps for {len(taps.dynamic)}"
    assert len(x) % taps.block_size == 0, f"{len(x)} rows are no blocks of {taps.block_size}"
    return x.shape[1]
