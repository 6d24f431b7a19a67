"""Where tests of Triton kernels run: interpreted on the CPU, or compiled on a CUDA device.

Triton decides at the import of a kernel which of the two it will be, for the whole process. So tests/conftest.py
asks `choose_interpreter` before anything imports triton: without a CUDA device kernels are interpreted (by numpy,
so sizes have to be tiny); with one they are compiled, unless TRITON_INTERPRET=1 asks for the interpreter.
A test takes the `device` fixture and runs once for each; the one that this process can't have is skipped.

A file of such tests begins with

    pytest.importorskip("triton", reason="triton is not installed")

and imports kernels in its fixtures and tests, or after that line.

Triton's interpreter cuts float32 to bfloat16 or e4m3 off instead of rounding it, and reads e4m3's NaN as 480; the
fixture mends that, so that their results are what the GPU gives. Arithmetic on bfloat16 itself means nothing there:
kernels cast to float32 first.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.kernel_bounds import check_bounds

_CUDA_NODES = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))
INTERPRET = "TRITON_INTERPRET"


def choose_interpreter() -> None:
    """Have kernels interpreted if this machine has no CUDA device. Imports neither torch nor triton."""
    if not any(node.exists() for node in _CUDA_NODES):
        os.environ.setdefault(INTERPRET, "1")


def is_interpreted() -> bool:
    """Kernels of this process run in numpy."""
    return os.environ.get(INTERPRET, "0").lower() in ("1", "true", "on", "y", "yes")


@cache
def mend_interpreter() -> None:
    """Have the interpreter round float32 to bfloat16 and e4m3 as the GPU does, multiply matrices of it, and loop to run-time ends."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.cast_impl

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(to_bfloat16(src.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            wide = np.asarray(src.data).astype(np.uint32) << np.uint32(16)
            return TensorHandle(np.asarray(wide).view(np.float32), tl.float32)
        return plain(self, src, dst_type)

    plain_narrowed = InterpreterBuilder.create_fp_to_fp

    def narrowed(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.float8e4nv):
            return TensorHandle(to_e4m3(src.data), tl.float8e4nv)
        if src.dtype.scalar == tl.float8e4nv:
            wide = TensorHandle(from_e4m3(src.data), tl.float32)
            return wide if dst_type.scalar == tl.float32 else self.cast_impl(wide, dst_type)
        return plain_narrowed(self, src, dst_type, rounding_mode)

    plain_dot = InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return plain_dot(self, a, b, *others)

    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = narrowed
    InterpreterBuilder.create_dot = dot
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # numpy >= 2.4 makes no int of an array of one element, which is what the interpreter's scalars are.
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch
    check_bounds(interpreter)
    quicken_calls()


def quicken_calls() -> None:
    """Have kernels call functions without patching triton.language anew each time, which takes most of their time."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction

    patched: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The kernel has patched tl. What Triton's own functions see, tl.core, is never put back: once is enough.
        scope = self.fn.__globals__
        if scope["__name__"] not in patched and not any(value is tl for value in scope.values()):
            interpreter._patch_lang(self.fn)
            patched.add(scope["__name__"])
        return self.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call
    plain, by_scalar = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)
    # Types of blocks and pointers have no hash.
    interpreter._get_np_dtype = lambda ty: (by_scalar if type(ty) is tl.dtype else plain)(ty)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits, uint16, of float32 x in bfloat16."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """The bits, uint8, of float32 x in e4m3 as the GPU rounds it: to the nearest, ties to even, cut off at 448."""
    magnitude = np.minimum(np.abs(np.asarray(x, dtype=np.float32)), np.float32(448))
    # Below 2^-6 numbers are as far apart as just above it.
    exponent = np.frexp(np.maximum(magnitude, np.float32(2.0**-6)))[1] - 1
    steps = np.rint(np.ldexp(magnitude, 3 - exponent))  # 8 to 16 in each power of two
    bits = np.where(np.isnan(x), 0x7F, (exponent + 6) * 8 + np.nan_to_num(steps))
    return (bits.astype(np.uint8) | np.where(np.signbit(x), 0x80, 0).astype(np.uint8)).astype(np.uint8)


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    """float32 of the bits, uint8, of e4m3."""
    bits = np.asarray(codes, dtype=np.uint8).astype(np.int32)
    exponent, digits = bits >> 3 & 15, bits & 7
    # Below 2^-6 there is no leading one.
    size = np.ldexp(np.where(exponent > 0, 8.0 + digits, digits), np.maximum(exponent, 1) - 10)
    size = np.where(bits & 0x7F == 0x7F, np.nan, size)
    return np.where(bits & 0x80, -size, size).astype(np.float32)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["interpreted", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of the torch device on which a kernel's operands go: cpu (interpreted) and cuda in turn."""
    # Imported here: conftest loads this file before it may load torch.
    import torch

    if request.param == "cpu":
        if not is_interpreted():
            pytest.skip("kernels of this process are compiled; TRITON_INTERPRET=1 runs them on the CPU")
        mend_interpreter()
    elif is_interpreted():
        pytest.skip("kernels of this process are interpreted" if torch.cuda.is_available() else "no CUDA device")
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    # Where numpy warns, the GPU quietly gives inf or nan.
    with np.errstate(all="ignore"):
        yield request.param
