"""What a program of skinny_gemm does with a unit: its tiles, its share of the sums, and where they go.

row, n: first row of x and first column of the result (of either half of a gated weight) of the unit.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from memsvc.device.kernels.mlp import activate
from memsvc.device.kernels.norm import rounded

DIRECT, COUNTED, LEFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What becomes of a unit: it has one program; the last program adds up; the kernel after adds up."""


@triton.jit
def _load_tile(source, tiles, row, k, num_rows, width, stride, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """[ROWS, BLOCK_K] of a matrix from (row, k) on, 0 outside. tiles: its tensor map, or None."""
    if tiles is not None:
        return tiles.load([row, k])
    else:
        rows, cols = row + tl.arange(0, ROWS), k + tl.arange(0, BLOCK_K)
        seen = (rows < num_rows)[:, None] & (cols < width)[None, :]
        return tl.load(source + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=seen, other=0.0)


@triton.jit
def prefetch_rows(w, row, k, num_rows, width, stride, BLOCK_N: tl.constexpr, COLS: tl.constexpr):
    """Have COLS columns of rows [row, row + BLOCK_N) brought into the L2 cache, as far as there are any."""
    rows = tl.minimum(row + tl.arange(0, BLOCK_N), num_rows - 1).to(tl.int64)
    num_bytes = tl.minimum(width - k, COLS) * 2 + tl.zeros([BLOCK_N], tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0", "=r,l,r", [w + rows * stride + k, num_bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def dot_parts(acc, up, x, x_tiles, w, w_tiles, row, n, k, num_rows, num_out, width, x_stride, w_stride,
              ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """acc, and up of a gated weight, with one part of a unit added: [BLOCK_N, ROWS]."""
    weight_rows = 2 * num_out if GATED else num_out
    turned = tl.trans(_load_tile(x, x_tiles, row, k, num_rows, width, x_stride, ROWS, BLOCK_K))
    acc = tl.dot(_load_tile(w, w_tiles, n, k, weight_rows, width, w_stride, BLOCK_N, BLOCK_K), turned, acc)
    if GATED:
        other = _load_tile(w, w_tiles, num_out + n, k, weight_rows, width, w_stride, BLOCK_N, BLOCK_K)
        up = tl.dot(other, turned, up)
    return acc, up


@triton.jit
def _with_bias(value, bias, cols, seen):
    if bias is not None:
        value += tl.load(bias + cols, mask=seen, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def _store_result(value, up, bias, out, rows, cols, num_rows, num_out, ACT: tl.constexpr):
    """A unit's sums float32 [rows, cols], of a gated weight those of both halves, into out [num_rows, num_out]."""
    inside = cols < num_out
    value = _with_bias(value, bias, cols, inside)
    if ACT != "":
        up = rounded(_with_bias(up, bias, num_out + cols, inside), out)
        value = rounded(activate(rounded(value, out), ACT), out) * up
    at = rows.to(tl.int64)[:, None] * num_out + cols[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None] & inside[None, :])


@triton.jit
def _sum_slabs(slabs, at, seen, count, slab_size, SLABS: tl.constexpr):
    total = tl.load(slabs + at, mask=seen, other=0.0, cache_modifier=".cg")
    for slab in tl.static_range(1, SLABS):
        total += tl.load(slabs + slab * slab_size + at, mask=seen & (slab < count), other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _store_slab(acc, up, slabs, slab, rows, cols, num_rows, num_out, GATED: tl.constexpr):
    width = num_out * (2 if GATED else 1)
    seen = (rows < num_rows)[:, None] & (cols < num_out)[None, :]
    own = slabs + (slab * num_rows.to(tl.int64) + rows)[:, None] * width + cols[None, :]
    tl.store(own, acc, mask=seen)
    if GATED:
        tl.store(own + num_out, up, mask=seen)


@triton.jit
def keep(acc, up, bias, out, slabs, slab, count, row, n, num_rows, num_out, ROWS: tl.constexpr,
         BLOCK_N: tl.constexpr, ACT: tl.constexpr, FINISH: tl.constexpr):  # fmt: skip
    """What one program found of a unit, one of `count` that share it: the result, or its slab."""
    GATED: tl.constexpr = ACT != ""
    rows, cols = row + tl.arange(0, ROWS), n + tl.arange(0, BLOCK_N)
    acc, up = tl.trans(acc), tl.trans(up)
    if FINISH == DIRECT:
        _store_result(acc, up, bias, out, rows, cols, num_rows, num_out, ACT)
    elif FINISH == LEFT:
        _store_slab(acc, up, slabs, slab, rows, cols, num_rows, num_out, GATED)
    elif count == 1:
        _store_result(acc, up, bias, out, rows, cols, num_rows, num_out, ACT)
    else:
        _store_slab(acc, up, slabs, slab, rows, cols, num_rows, num_out, GATED)


@triton.jit
def arrive(bias, out, slabs, counters, unit, count, row, n, num_rows, num_out, ROWS: tl.constexpr,
           BLOCK_N: tl.constexpr, ACT: tl.constexpr, SLABS: tl.constexpr, SUM_ROWS: tl.constexpr):  # fmt: skip
    """This program's slab of a unit is stored. The last of the `count` that share it adds up."""
    GATED: tl.constexpr = ACT != ""
    if count > 1:
        # Every thread's stores lie before the count of one, and every thread's loads behind it.
        tl.debug_barrier()
        if tl.atomic_add(counters + unit, 1, sem="acq_rel", scope="gpu") == count - 1:
            tl.debug_barrier()
            tl.store(counters + unit, 0)
            cols = n + tl.arange(0, BLOCK_N)
            width = num_out * (2 if GATED else 1)
            slab_size = num_rows.to(tl.int64) * width
            # A few rows at a time: the loads of all slabs are on their way together, and each has its registers.
            for start in range(row, tl.minimum(row + ROWS, num_rows), SUM_ROWS):
                rows = start + tl.arange(0, SUM_ROWS)
                seen = (rows < tl.minimum(row + ROWS, num_rows))[:, None] & (cols < num_out)[None, :]
                at = rows.to(tl.int64)[:, None] * width + cols[None, :]
                total = _sum_slabs(slabs, at, seen, count, slab_size, SLABS)
                other = total
                if GATED:
                    other = _sum_slabs(slabs + num_out, at, seen, count, slab_size, SLABS)
                _store_result(total, other, bias, out, rows, cols, num_rows, num_out, ACT)


@triton.jit
def sharers(unit, parts, per):
    """Programs that share a unit. Tiled, it is the same number for all."""
    return (unit * parts + parts - 1) // per - unit * parts // per + 1
