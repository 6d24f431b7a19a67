"""y = x W^T for few rows of x: the weight is streamed through the chip once, and what follows is done on the way.

The product is computed as W x^T, so that the weight's rows fill the matrix units and x's few rows are the narrow
side. Sums are float32 and are rounded where separate kernels would round: the product (with its bias) once, then
what comes after it. A unit shared by several programs is added up in their order by the last of them to arrive, or
by the kernel after (skinny_norm): no float is ever added atomically, results are the same from run to run.

A row's result depends neither on the other rows nor on how many there are, as long as the plan and the tile of rows
(16, 32, 64, 128: the power of two that holds m) are the same: rows are columns of their own in every product. With
another plan or tile the parts of the sum over K may be grouped otherwise, which float32 sums show, and a bfloat16
result in a unit in the last place now and then; so it is between a plan and cuBLAS.

Weights are read before the kernel ahead has ended if launch.OVERLAP is on: so no kernel may write them.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from memsvc.device.kernels import launch as launching
from memsvc.device.kernels.attention_tiles import num_multiprocessors
from memsvc.device.kernels.launch import launch, padded, wait_for_inputs
from memsvc.device.kernels.mlp import ACTIVATIONS
from memsvc.device.kernels.skinny_tiles import Cut, SkinnyPlan
from memsvc.device.kernels.skinny_units import COUNTED, DIRECT, LEFT, arrive, dot_parts, keep, prefetch_rows, sharers

__all__ = ["DTYPES", "Parts", "skinny_gated", "skinny_linear", "skinny_parts"]

DTYPES = (torch.bfloat16, torch.float16)
_SUMMED = 256
"""Values a warp of one slab that are added up at a time: 8 a thread, for all slabs at once."""
MAX_UNITS = 1 << 16
"""Units that may be shared by programs in one launch: a counter each."""

_WIDTH = 8
"""Values in 16 bytes: rows of operands begin at multiples of it, or are read narrowly and without TMA and prefetch."""


@triton.jit(do_not_specialize=["num_rows", "row_tiles", "parts", "per", "count"])
def _tiled(x, x_tiles, w, w_tiles, bias, out, slabs, counters, num_rows, num_out, width, x_stride, w_stride, row_tiles,
           parts, per, count, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACT: tl.constexpr,
           SLABS: tl.constexpr, SUM_ROWS: tl.constexpr, FINISH: tl.constexpr, PREFETCH: tl.constexpr,
           OVERLAP: tl.constexpr):  # fmt: skip
    GATED: tl.constexpr = ACT != ""
    slab = tl.program_id(0) // row_tiles % count
    # Programs of different row tiles read the same weights: they are neighbours.
    unit = tl.program_id(0) // (row_tiles * count) * row_tiles + tl.program_id(0) % row_tiles
    row, n = unit % row_tiles * ROWS, unit // row_tiles * BLOCK_N
    first, last = slab * per, tl.minimum(slab * per + per, tl.cdiv(width, BLOCK_K))
    if PREFETCH:
        weight_rows = 2 * num_out if GATED else num_out
        prefetch_rows(w, n, first * BLOCK_K, weight_rows, width, w_stride, BLOCK_N, PREFETCH)
        if GATED:
            prefetch_rows(w, num_out + n, first * BLOCK_K, weight_rows, width, w_stride, BLOCK_N, PREFETCH)
    wait_for_inputs(OVERLAP)
    acc, up = tl.zeros([BLOCK_N, ROWS], tl.float32), tl.zeros([BLOCK_N, ROWS], tl.float32)
    for part in range(first, last):
        acc, up = dot_parts(acc, up, x, x_tiles, w, w_tiles, row, n, part * BLOCK_K, num_rows, num_out, width,
                            x_stride, w_stride, ROWS, BLOCK_N, BLOCK_K, GATED)  # fmt: skip
    keep(acc, up, bias, out, slabs, slab, count, row, n, num_rows, num_out, ROWS, BLOCK_N, ACT, FINISH)
    if FINISH == COUNTED:
        arrive(bias, out, slabs, counters, unit, count, row, n, num_rows, num_out, ROWS, BLOCK_N, ACT, SLABS, SUM_ROWS)


@triton.jit(do_not_specialize=["num_rows", "row_tiles", "parts", "per", "count"])
def _streamed(x, x_tiles, w, w_tiles, bias, out, slabs, counters, num_rows, num_out, width, x_stride, w_stride,
              row_tiles, parts, per, count, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
              ACT: tl.constexpr, SLABS: tl.constexpr, SUM_ROWS: tl.constexpr, FINISH: tl.constexpr,
              PREFETCH: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    # count: of all units here.
    GATED: tl.constexpr = ACT != ""
    program = tl.program_id(0)
    first, last = program * per, tl.minimum(program * per + per, count * parts)
    if PREFETCH:
        n, k = first // parts // row_tiles * BLOCK_N, first % parts * BLOCK_K
        weight_rows = 2 * num_out if GATED else num_out
        prefetch_rows(w, n, k, weight_rows, width, w_stride, BLOCK_N, PREFETCH)
        if GATED:
            prefetch_rows(w, num_out + n, k, weight_rows, width, w_stride, BLOCK_N, PREFETCH)
    wait_for_inputs(OVERLAP)
    acc, up = tl.zeros([BLOCK_N, ROWS], tl.float32), tl.zeros([BLOCK_N, ROWS], tl.float32)
    for step in range(first, last):
        unit = step // parts
        row, n, part = unit % row_tiles * ROWS, unit // row_tiles * BLOCK_N, step - unit * parts
        acc, up = dot_parts(acc, up, x, x_tiles, w, w_tiles, row, n, part * BLOCK_K, num_rows, num_out, width,
                            x_stride, w_stride, ROWS, BLOCK_N, BLOCK_K, GATED)  # fmt: skip
        if (part == parts - 1) | (step == last - 1):
            keep(acc, up, bias, out, slabs, program - unit * parts // per, sharers(unit, parts, per), row, n, num_rows,
                 num_out, ROWS, BLOCK_N, ACT, FINISH)  # fmt: skip
            acc, up = tl.zeros([BLOCK_N, ROWS], tl.float32), tl.zeros([BLOCK_N, ROWS], tl.float32)
    # Barriers and counts would keep the loop above from being pipelined. No unit in between is shared.
    if FINISH == COUNTED:
        for place in tl.static_range(2):
            unit = (last - 1 if place else first) // parts
            if (place == 0) | (unit != first // parts):
                arrive(bias, out, slabs, counters, unit, sharers(unit, parts, per), unit % row_tiles * ROWS,
                       unit // row_tiles * BLOCK_N, num_rows, num_out, ROWS, BLOCK_N, ACT, SLABS, SUM_ROWS)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A product that is still to be added up, by a kernel on the same stream."""

    slabs: torch.Tensor
    """float32 [slabs, m, n]. A unit shared by fewer programs has NaN or anything in the rest."""
    cut: Cut
    block_n: int
    dtype: torch.dtype
    """Of x and of the product, once it is added up."""


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: SkinnyPlan,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """F.linear(x [m, k], weight [n, k], bias [n]) in out_dtype, or x's; 16-bit operands, rows of both contiguous.

    Launches that share units may not run beside each other on one device: one stream, or streams that wait.
    """
    out = torch.empty((len(x), len(weight)), dtype=out_dtype or x.dtype, device=x.device)
    _launch(x, (weight, bias), out, plan, "")
    return out


def skinny_gated(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: str, plan: SkinnyPlan
) -> torch.Tensor:
    """mlp.silu_mul(F.linear(x, weight, bias), act), rounded where that rounds; weight [2 I, k], gate's rows first."""
    if act not in ACTIVATIONS:
        raise ValueError(f"activation {act!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    _launch(x, (weight, bias), out, plan, act)
    return out


def skinny_parts(x: torch.Tensor, weight: torch.Tensor, plan: SkinnyPlan) -> Parts:
    """The product of x and weight, left for skinny_norm to add up (and to add a bias to)."""
    cuts = _cut(x, len(weight), plan)
    slabs = torch.empty((cuts.slabs, len(x), len(weight)), dtype=torch.float32, device=x.device)
    _launch(x, (weight, None), slabs, plan, "", left=True)
    return Parts(slabs=slabs, cut=cuts, block_n=plan.block_n, dtype=x.dtype)


def _cut(x: torch.Tensor, num_out: int, plan: SkinnyPlan) -> Cut:
    return Cut.of(plan, (max(1, len(x)), num_out, x.shape[1]), num_multiprocessors(x.device))


def _launch(
    x: torch.Tensor,
    layer: tuple[torch.Tensor, torch.Tensor | None],
    out: torch.Tensor,
    plan: SkinnyPlan,
    act: str,
    left: bool = False,
) -> None:
    weight, bias = layer
    m, k = x.shape
    num_out, halves = len(weight) // (2 if act else 1), 2 if act else 1
    assert weight.shape == (halves * num_out, k), f"weight {list(weight.shape)} for rows of {k}"
    assert x.stride(1) == weight.stride(1) == 1, f"strides of x {x.stride()}, of the weight {weight.stride()}"
    assert x.dtype in DTYPES, f"x is {x.dtype}, not one of {DTYPES}"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}"
    cuts = _cut(x, num_out, plan)
    finish, slabs, counts = DIRECT, None, None
    if left:
        finish, slabs = LEFT, out
    elif cuts.slabs > 1:
        finish, counts = COUNTED, counters(x.device, cuts.units)
        slabs = torch.empty((cuts.slabs, m, halves * num_out), dtype=torch.float32, device=x.device)
    aligned = all(t.stride(0) % _WIDTH == 0 and t.data_ptr() % 16 == 0 for t in (x, weight)) and k % _WIDTH == 0
    if plan.tma and not aligned:
        raise ValueError(f"tensor maps need rows at multiples of 16 bytes; strides are {x.stride()}, {weight.stride()}")
    launch(
        _streamed if plan.streams else _tiled, (cuts.programs if m else 0,), plan.num_warps, x,
        _tiles_of(x, cuts.rows, plan) if m else None, weight, _tiles_of(weight, plan.block_n, plan), bias,
        None if left else out, slabs, counts, m, num_out, k, x.stride(0), weight.stride(0), cuts.row_tiles, cuts.parts,
        cuts.per, cuts.units if plan.streams else cuts.slabs, ROWS=cuts.rows, BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k, ACT=act, SLABS=padded(cuts.slabs) if counts is not None else 1,
        SUM_ROWS=min(cuts.rows, max(1, _SUMMED * plan.num_warps // plan.block_n)), FINISH=finish.value,
        PREFETCH=plan.prefetch if launching.OVERLAP and aligned else 0, num_stages=plan.num_stages,
    )  # fmt: skip


def _tiles_of(source: torch.Tensor, rows: int, plan: SkinnyPlan) -> Any:
    return TensorDescriptor.from_tensor(source, [rows, plan.block_k]) if plan.tma else None


_COUNTERS: dict[torch.device, torch.Tensor] = {}


def counters(device: torch.device, num: int) -> torch.Tensor:
    """int32, all 0 between launches: how many programs have finished a unit. One tensor a device, never freed.

    The first call may not be in a capture: a graph's memory is another's when it is not replayed.
    """
    if num > MAX_UNITS:
        raise ValueError(f"{num} units are shared by programs, at most {MAX_UNITS} can be")
    if device not in _COUNTERS:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        assert not capturing, "the first launch that shares units is in a capture"
        _COUNTERS[device] = torch.zeros(MAX_UNITS, dtype=torch.int32, device=device)
    return _COUNTERS[device]
