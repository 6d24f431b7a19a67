"""What follows a product that skinny_parts has left in slabs: its sum, the residual sum, and the next norm. One launch."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.launch import launch, wait_for_inputs
from memsvc.device.kernels.norm import Tap, rounded, scaled_norm, tile
from memsvc.device.kernels.skinny_gemm import Parts
from memsvc.device.kernels.skinny_units import sharers


@triton.jit
def _product(slabs, bias, like, row, cols, inside, slab_size, row_tiles, parts, per, WIDTH: tl.constexpr,
             SLABS: tl.constexpr, UNEVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Columns of one row of the product float32, rounded to the type of `like`. UNEVEN: not all slabs of a unit count."""
    at = row.to(tl.int64) * WIDTH + cols
    count = sharers(cols // BLOCK_N * row_tiles + row // ROWS, parts, per)
    total = tl.load(slabs + at, mask=inside, other=0.0)
    for slab in tl.static_range(1, SLABS):
        seen = inside
        if UNEVEN:
            seen = inside & (slab < count)
        total += tl.load(slabs + slab * slab_size + at, mask=seen, other=0.0)
    if bias is not None:
        total += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    return rounded(total, like)


@triton.jit(do_not_specialize=["num_rows", "row_tiles", "parts", "per"])
def _sum_add_norm(slabs, bias, residual, weight, out, tap, tap_first, eps, num_rows, row_tiles, parts, per, tap_stride,
                  WIDTH: tl.constexpr, SLABS: tl.constexpr, UNEVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK: tl.constexpr, CENTRED: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    inside = cols < WIDTH
    scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    value = _product(slabs, bias, residual, row, cols, inside, num_rows.to(tl.int64) * WIDTH, row_tiles, parts, per,
                     WIDTH, SLABS, UNEVEN, ROWS, BLOCK_N)  # fmt: skip
    at = row.to(tl.int64) * WIDTH + cols
    value = rounded(value + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32), residual)
    tl.store(residual + at, value.to(residual.dtype.element_ty), mask=inside)
    if tap is not None:
        at_tap = (tl.load(tap_first).to(tl.int64) + row) * tap_stride + cols
        tl.store(tap + at_tap, value.to(tap.dtype.element_ty), mask=inside)
    mean_square = tl.sum(value * value, 0) / WIDTH
    value = scaled_norm(value, mean_square, scale, out, eps, CENTRED)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def sum_add_rms_norm(
    product: Parts,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: tuple[torch.Tensor, float, bool],
    tap: Tap | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm.add_rms_norm(product + bias, residual, *norm, tap), where norm is (weight, eps, zero_centred).

    residual: [m, n] of product's dtype, contiguous.
    """
    cut, (weight, eps, centred) = product.cut, norm
    count, m, width = product.slabs.shape
    assert residual.shape == (m, width), f"the product is {[m, width]}, the residual {list(residual.shape)}"
    assert residual.is_contiguous(), f"strides of the residual {residual.stride()}"
    assert residual.dtype == product.dtype, f"the product is {product.dtype}, the residual {residual.dtype}"
    out = torch.empty((m, width), dtype=residual.dtype, device=residual.device)
    block, _, warps = tile(width)
    uneven = cut.parts != count * cut.per
    launch(
        _sum_add_norm, (m,), warps, product.slabs, bias, residual, weight, out, tap and tap.features,
        tap and tap.first_row, eps, m, cut.row_tiles, cut.parts, cut.per, tap.features.stride(0) if tap else 0,
        WIDTH=width, SLABS=count, UNEVEN=uneven, ROWS=cut.rows, BLOCK_N=product.block_n, BLOCK=block, CENTRED=centred,
    )  # fmt: skip
    return out, residual
