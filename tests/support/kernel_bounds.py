"""Interpreted kernels may touch no memory but their operands': what a GPU would call an illegal access, or not notice.

The interpreter reads and writes raw addresses. An address outside of every operand's storage is an error here, with
the distance to the nearest one; a place that is masked off may be anywhere.
"""

import sys
from bisect import bisect_right
from typing import Any

import numpy as np

_spans: list[tuple[int, int]] = []
"""[first, past the last) byte of each storage that the running kernel was given, ascending."""


def check_bounds(interpreter: Any) -> None:
    """Have triton.runtime.interpreter check every load, store and atomic from now on."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    plain_args = executor._init_args_hst

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        made = plain_args(self, args, kwargs)
        _spans[:] = sorted({span for arg in (*made[0], *made[1].values()) for span in _spans_of(arg)})
        return made

    executor._init_args_hst = init_args
    # Loads and stores without a mask come through these as well.
    for name, mask_at in {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}.items():
        pointers_at = 1 if name == "create_atomic_rmw" else 0
        setattr(builder, name, _checked(getattr(builder, name), name, pointers_at, mask_at))


def allow_several_operands(monkeypatch: Any) -> None:
    """Let what one load reads lie in several operands, as rows do of which some are in a ring and some in a block."""
    plain = _check

    def check(name: str, pointers: np.ndarray, mask: np.ndarray, num_bytes: int) -> None:
        seen = np.broadcast_to(mask.astype(bool), pointers.shape)
        owner = np.searchsorted([first for first, _ in _spans], pointers, side="right")
        for number in np.unique(owner[seen]):
            plain(name, pointers, seen & (owner == number), num_bytes)

    monkeypatch.setattr(sys.modules[__name__], "_check", check)


def _checked(plain: Any, name: str, pointers_at: int, mask_at: int) -> Any:
    def call(self: Any, *args: Any) -> Any:
        pointers = args[pointers_at]
        _check(name, pointers.data, args[mask_at].data, pointers.get_element_ty().primitive_bitwidth // 8)
        return plain(self, *args)

    return call


def _spans_of(arg: Any) -> list[tuple[int, int]]:
    if isinstance(arg, tuple):
        return [span for part in arg for span in _spans_of(part)]
    tensor = getattr(arg, "base", arg)
    if not hasattr(tensor, "untyped_storage"):
        return []
    storage = tensor.untyped_storage()
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes())]


def _check(name: str, pointers: np.ndarray, mask: np.ndarray, num_bytes: int) -> None:
    seen = pointers if mask.all() else pointers[np.broadcast_to(mask.astype(bool), pointers.shape)]
    if seen.size == 0:
        return
    first, last = int(seen.min()), int(seen.max()) + num_bytes
    at = bisect_right(_spans, (first, 1 << 64)) - 1
    if at < 0 or last > _spans[at][1]:
        near = [f"[{start - first:+d}, {end - first:+d})" for start, end in _spans]
        raise IndexError(
            f"{name} of {last - first} bytes from one address on; operands lie at {', '.join(near)} from it"
        )
