"""The compiled kernels as functions of tensors."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from memsvc.device.cpu.calls import GateCall, NormCall, RotateCall, WriteCall
from memsvc.device.cpu.library import open_library

MAX_NORM_WIDTH = 1 << 17
"""Up to here torch sums a row in three levels, as the norm does."""


class Kernels:
    """Each method gives the bits of the torch code it stands for, attention apart, or None if it doesn't take these
    tensors. Inputs are bfloat16 on the CPU, as kernels_for has seen."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rms_norm = _function(library.rms_norm)
        self._silu_mul = _function(library.silu_mul)
        self._rotate = _function(library.rotate)
        self._write_kv = _function(library.write_kv)
        self._attend = {"dot": _function(library.paged_attention_by_dot)}
        if library.cpu_has_tiles():
            self._attend["tiles"] = _function(library.paged_attention_by_tiles)
        self.attention = list(self._attend)[-1]
        """The route attend takes: of registers (dot), or of tiles (AMX) where the CPU has them."""

    @property
    def attentions(self) -> list[str]:
        """Routes that this CPU has."""
        return list(self._attend)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        """RMSNorm of x [n, d] with weight [d], or of x [n, heads, d] with weight [d] or [heads, d]."""
        if x.dim() == 2:
            (num_rows, width), num_heads, head_stride = x.shape, 1, 0
        elif x.dim() == 3:
            num_rows, num_heads, width = x.shape
            head_stride = x.stride(1)
        else:
            return None
        weight_stride = width if weight.dim() == 2 else 0
        fits = weight.shape == x.shape[-weight.dim() :] and weight.is_contiguous() and x.stride(-1) == 1
        if not fits or weight.dim() >= x.dim() or weight.dtype != torch.bfloat16 or not 0 < width <= MAX_NORM_WIDTH:
            return None
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rms_norm(
            NormCall(
                x.data_ptr(), weight.data_ptr(), None, out.data_ptr(),
                num_rows, num_heads, width, x.stride(0), head_stride, weight_stride, 0, eps,
            )
        )  # fmt: skip
        return out

    def add_and_norm(
        self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """x += more, then RMSNorm of x: x and more [n, d] of one dtype."""
        fits = x.dim() == 2 and more.shape == x.shape and more.dtype == x.dtype and weight.shape == x.shape[1:]
        whole = x.stride(1) == more.stride(1) == 1 and weight.is_contiguous()
        if not (fits and whole) or weight.dtype != torch.bfloat16 or not 0 < x.shape[1] <= MAX_NORM_WIDTH:
            return None
        out = torch.empty(x.shape, dtype=x.dtype)
        num_rows, width = x.shape
        self._rms_norm(
            NormCall(
                x.data_ptr(), weight.data_ptr(), more.data_ptr(), out.data_ptr(),
                num_rows, 1, width, x.stride(0), 0, 0, more.stride(0), eps,
            )
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor | None:
        """silu(gate) * up of gate_up [n, 2 d], gate first: [n, d]."""
        if gate_up.dim() != 2 or gate_up.stride(1) != 1 or gate_up.shape[1] < 2:
            return None
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_rows, width), dtype=gate_up.dtype)
        gate = gate_up.data_ptr()
        up = gate + width * gate_up.element_size()
        self._silu_mul(GateCall(gate, up, out.data_ptr(), num_rows, width, gate_up.stride(0)))
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
        """Rotary.rotate of x [n, heads, d] by contiguous tables [n, 1, rotary_dim]."""
        if x.dim() != 3 or cos.shape != (len(x), 1, cos.shape[-1]) or cos.shape != sin.shape:
            return None
        num_rows, num_heads, head_dim = x.shape
        whole = x.stride()[1:] == (head_dim, 1) and cos.is_contiguous() and sin.is_contiguous()
        if not whole or cos.dtype != x.dtype or sin.dtype != x.dtype or not x.numel():
            return None
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rotate(
            RotateCall(
                x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
                num_rows, num_heads, head_dim, cos.shape[-1], x.stride(0),
            )
        )  # fmt: skip
        return out

    def write_kv(
        self,
        pages: tuple[torch.Tensor, torch.Tensor],
        place: tuple[torch.Tensor, torch.Tensor],
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> bool:
        """k and v [n, kv_heads, d] to place (page ids and offsets, int64 [n] each) of KvPool.k and .v: True if done.

        IndexError if a place does not exist; rows before it are written.
        """
        form, num_rows = pages[0].shape, len(place[0])
        inner = (form[3], 1)
        whole = k.stride()[1:] == v.stride()[1:] == inner and all(part.is_contiguous() for part in place)
        fits = k.shape == v.shape == (num_rows, *form[2:]) and len(place[1]) == num_rows
        if not (whole and fits) or k.dtype != pages[0].dtype or v.dtype != k.dtype:
            return False
        written = self._write_kv(
            WriteCall(
                k.data_ptr(), v.data_ptr(), pages[0].data_ptr(), pages[1].data_ptr(),
                place[0].data_ptr(), place[1].data_ptr(),
                num_rows, form[2] * form[3], k.stride(0), v.stride(0), pages[0].stride(0), form[0], form[1],
            )
        )  # fmt: skip
        if written < num_rows:
            at = f"page {int(place[0][written])}, offset {int(place[1][written])}"
            raise IndexError(f"row {written} goes to {at} of {form[0]} pages x {form[1]} tokens")
        return True

    def attend(self, call: ctypes.Structure) -> None:
        """Runs an AttentionCall of a KernelPlan."""
        done = self._attend[self.attention](call)
        assert done == call.num_blocks, f"a page table names a page outside [0, {call.num_pages})"


def _function(function: Callable[[object], int]) -> Callable[[ctypes.Structure], int]:
    function.restype = ctypes.c_int64  # pyright: ignore[reportFunctionMemberAccess]

    def run(call: ctypes.Structure) -> int:
        return function(ctypes.byref(call))

    return run


@cache
def load() -> Kernels | None:
    """The kernels, if they were built from the present source and this CPU has the instructions. Looked for once."""
    library = open_library()
    return None if library is None else Kernels(library)


def kernels_for(x: torch.Tensor) -> Kernels | None:
    """The kernels if they take such tensors, and nobody wants gradients of what they give."""
    if x.dtype is not torch.bfloat16 or not x.is_cpu or torch.is_grad_enabled():
        return None
    return load()
