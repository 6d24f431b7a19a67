"""FlashInfer's gated delta rule for prompts on Hopper: a library built beforehand, called without its compiler.

FlashInfer has these kernels in CuTe DSL, which would compile them in the middle of a request, with a package that isn't
needed otherwise. So they come as one .so of seven functions, made by memsvc.device.build_flashinfer_delta and found where
FlashInfer's attention kernels are found. They take q and k at unit length, the factor e^g itself, and states
[v_dim, k_dim].
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from memsvc.device.delta_plan import DeltaHeads, Rule
from memsvc.device.gated_delta import DeltaRows
from memsvc.device.kernels.launch import cut
from memsvc.device.layers import ZeroCentredRMSNorm
from memsvc.device.slots import Stage

LIBRARY = "gated_delta_prefill_sm90"
"""Folder and file under flashinfer/data/aot."""
HEAD_DIM, CAPABILITY = 128, 9
BLOCK = 64
"""Rows that the kernels compute at once."""
PARTS_ROWS = 1024
"""Of the longest sequence, from which on it may be cut into pieces.

docs/benchmarks/delta-prefill-h200.json measured what piece_rows chose (one sequence of 1024: 107 us, in pieces); the
two ways were not set side by side.
"""
FUNCTIONS = (
    "whole_bf16", "parts_t_bf16", "parts_mn_bf16", "parts_fix_few", "parts_fix_some", "parts_fix_many",
    "parts_out_bf16",
)  # fmt: skip
"""Of the library, all of which it has to have."""
_EPSILON = 1e-6


def lacks(dtype: torch.dtype, device: torch.device, heads: DeltaHeads) -> str | None:
    """Why the rule can't be had for such a model here, or None. Loads the library if all else fits."""
    if device.type != "cuda":
        return f"its kernels are for a CUDA device, not {device}"
    if (found := torch.cuda.get_device_capability(device)[0]) != CAPABILITY:
        return f"its kernels are for compute capability {CAPABILITY}, {device} has {found}"
    if dtype != torch.bfloat16:
        return f"its kernels are for bfloat16, not {dtype}"
    if (heads.k_dim, heads.v_dim) != (HEAD_DIM, HEAD_DIM):
        return f"its kernels are for heads of {HEAD_DIM}, not {heads.k_dim} and {heads.v_dim}"
    # Of one head the step from head to head is lost on the way, and TMA refuses what stands there instead.
    if heads.num_k_heads < 2:
        return "its kernels take no single key head"
    package = importlib.util.find_spec("flashinfer")
    if package is None or package.origin is None:
        return "flashinfer is not installed"
    built = Path(package.origin).parent / "data" / "aot" / LIBRARY / f"{LIBRARY}.so"
    if not built.exists():
        return f"FlashInfer's {LIBRARY}.so is not built"
    try:
        _load()
    except Exception as error:
        # Whatever another version of FlashInfer, or of what it loads libraries with, may raise: there are other rules.
        return f"FlashInfer's {LIBRARY}.so can't be used: {str(error)[:300]}"
    return None


class FlashInferRule:
    """See PlanRule of memsvc.device.delta_plan. Whether it can be had, lacks says.

    Whole sequences take one launch, in which a program goes through all rows of one, for one head. Pieces of sequences
    take four, and go at once: each from a state that is made up before, from what all earlier pieces do to a state.
    """

    name = "flashinfer"
    dtype = torch.bfloat16

    def __init__(
        self,
        device: torch.device,
        num_heads: int,
        *,
        piece: int | None = None,
        num_sms: int = 0,
        library: Any = None,
    ) -> None:
        """num_heads: of v. piece: rows of each, a multiple of BLOCK; 0: whole sequences; None: as piece_rows says.

        num_sms: multiprocessors, if not those of device. library: in the place of the one that is built.
        """
        self._num_heads = num_heads
        self._piece = piece
        self._num_sms = num_sms or torch.cuda.get_device_properties(device).multi_processor_count
        self._library = library or _load()
        # A norm by the root of the mean makes rows sqrt(HEAD_DIM) long.
        weight = torch.full((HEAD_DIM,), HEAD_DIM**-0.5 - 1.0, device=device)
        self._norm = ZeroCentredRMSNorm(weight, _EPSILON / HEAD_DIM)
        self._tensormaps = torch.empty(self._num_sms * 128, dtype=torch.uint8, device=device)
        """Room for a TMA descriptor of each multiprocessor. Calls run one after the other."""

    def __call__(self, lens: Sequence[int], stage: Stage) -> Rule:
        """See PlanRule."""
        assert min(lens) > 0, f"{lens=}: the state after no rows would not be written"
        lengths = _Lengths(stage(np.cumsum([0, *lens]).astype(np.int64)), len(lens), sum(lens), max(lens))
        size = self._piece
        if size is None:
            size = piece_rows(lens, self._num_heads, self._num_sms)

        def run(rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            call = _Call.of(lengths, rows, state, self._norm, self._tensormaps)
            if size:
                call.parts(self._library, size)
            else:
                call.whole(self._library)
            return call.out[None, : lengths.num_rows], call.after.transpose(2, 3)

        return run


def piece_rows(lens: Sequence[int], num_heads: int, num_sms: int) -> int:
    """Rows of a piece, a multiple of BLOCK, or 0 for whole sequences.

    Pieces are for long sequences that leave more than half of the device idle, and all of all heads are on it at once.
    """
    if 2 * len(lens) * num_heads >= num_sms or max(lens) < PARTS_ROWS:
        return 0
    # At least so many rows that there are no more pieces than fit.
    first = cut(cut(sum(lens) * num_heads, num_sms), BLOCK) * BLOCK
    sizes = range(first, max(lens) + BLOCK, BLOCK)
    return next(size for size in sizes if sum(cut(num, size) for num in lens) * num_heads <= num_sms)


@functools.cache
def _load() -> Any:
    """The library. Raises AttributeError if it lacks one of FUNCTIONS."""
    # Without this FlashInfer would go to look for a compiler if the library can't be loaded.
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    library = importlib.import_module("flashinfer.jit.core").gen_jit_spec(LIBRARY, []).build_and_load()
    # A name is looked up when it is first used, which would be in a step.
    for name in FUNCTIONS:
        getattr(library, name)
    return library


@dataclass(frozen=True, slots=True)
class _Lengths:
    ends: torch.Tensor
    """int64 [n + 1], on the device: where each sequence begins, and the end."""
    num: int
    num_rows: int
    longest: int

    def places(self, size: int) -> int:
        """Room for pieces of that size as the kernels number them, from each sequence's first row and place.

        Two at least: a stride over one is lost on the way.
        """
        full = min(self.num, self.num_rows)
        return max(2, full + (self.num_rows - full) // size)

    def most(self, size: int) -> int:
        """Pieces of the longest sequence."""
        return cut(self.longest, size)


@dataclass(frozen=True, slots=True)
class _Call:
    """Operands in the forms that the kernels ask for."""

    lengths: _Lengths
    q: torch.Tensor
    """[t, k_heads, HEAD_DIM], as k."""
    k: torch.Tensor
    v: torch.Tensor
    """[t, v_heads, HEAD_DIM]"""
    alpha: torch.Tensor
    """e^g, float32 [t * v_heads]: what a row leaves of the state"""
    beta: torch.Tensor
    state: torch.Tensor
    """float32 [n, v_heads, v_dim, k_dim]: before the rows,"""
    after: torch.Tensor
    """and after them."""
    out: torch.Tensor
    tensormaps: torch.Tensor
    """Room for a TMA descriptor of each multiprocessor."""

    @classmethod
    def of(
        cls, lengths: _Lengths, rows: DeltaRows, state: torch.Tensor, norm: ZeroCentredRMSNorm, tensormaps: torch.Tensor
    ) -> "_Call":
        """From what a rule is given."""
        q, k = (_normed(x[0], norm) for x in (rows.q, rows.k))
        alpha, beta = rows.g[0].exp(), rows.beta[0]
        if lengths.num_rows == 1:
            q, k, v, alpha, beta = (_with_one_more(x) for x in (q, k, rows.v[0], alpha, beta))
        else:
            v = rows.v[0]
        before = state.transpose(2, 3).contiguous()
        return cls(
            lengths, q, k, v.contiguous(), alpha.flatten(), beta.flatten(), before, torch.empty_like(before),
            torch.empty_like(v, memory_format=torch.contiguous_format), tensormaps,
        )  # fmt: skip

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Of q, k, v and the states."""
        return self.q.shape[1], self.k.shape[1], self.v.shape[1], self.v.shape[1]

    def whole(self, library: Any) -> None:
        """Sequences, each from its state to its end."""
        num, num_heads = self.lengths.num, self.v.shape[1]
        library.whole_bf16(
            self.q.permute(0, 2, 1), *map(_columns, (self.k, self.v, self.out)), self.alpha, self.beta,
            self.after.flatten(), self.state.flatten(), None, None, self.tensormaps, self.lengths.ends, HEAD_DIM**-0.5,
            *self.heads, num, 1, 0, num * num_heads,
        )  # fmt: skip

    def parts(self, library: Any, size: int) -> None:
        """Pieces of `size` rows."""
        lengths, num, k, v = self.lengths, self.lengths.num, _columns(self.k), _columns(self.v)
        num_k, num_heads = self.k.shape[1], self.v.shape[1]
        num_blocks, num_pieces, most = lengths.places(BLOCK), lengths.places(size), lengths.most(size)
        inverse = self.v.new_empty((num_blocks, num_heads, BLOCK, BLOCK))
        library.parts_t_bf16(
            k, self.beta, inverse.flatten(), lengths.ends, num_k, num_heads, num_blocks, lengths.most(BLOCK), num
        )
        form = (num_pieces, num_heads, HEAD_DIM, HEAD_DIM)
        moves, gains, starts = (self.state.new_empty(form) for _ in range(3))
        library.parts_mn_bf16(
            k, v, _squares(inverse), self.alpha, moves.flatten(), gains.flatten(), lengths.ends, size,
            *self.heads[1:], num_pieces, most, num,
        )  # fmt: skip
        kind = "few" if num_heads <= 8 else "some" if num_heads <= 16 else "many"
        getattr(library, f"parts_fix_{kind}")(
            _squares(moves), _squares(gains), self.state.flatten(), starts.flatten(), lengths.ends, size, num_pieces,
            num, num_heads,
        )  # fmt: skip
        library.parts_out_bf16(
            self.q.permute(0, 2, 1), k, v, _squares(inverse), _columns(self.out), self.alpha, self.after.flatten(),
            starts.flatten(), self.state.flatten(), self.tensormaps, lengths.ends, HEAD_DIM**-0.5, *self.heads, size,
            num_pieces, most, num,
        )  # fmt: skip


def _normed(x: torch.Tensor, norm: ZeroCentredRMSNorm) -> torch.Tensor:
    """x [t, heads, HEAD_DIM] at unit length."""
    if not x.is_cuda:
        return norm(x)
    # It takes Triton, which a machine without a device may lack.
    from memsvc.device.kernels.norm import rms_norm

    return rms_norm(x.reshape(-1, HEAD_DIM), norm).view(x.shape)


def _with_one_more(x: torch.Tensor) -> torch.Tensor:
    """A row of zeros behind x's one, which is no sequence's: of one row the step to the next is lost on the way."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))


def _columns(x: torch.Tensor) -> torch.Tensor:
    """x [t, heads, dim] as [dim, t, heads], a view."""
    return x.permute(2, 0, 1)


def _squares(x: torch.Tensor) -> torch.Tensor:
    """x [n, heads, a, b] as [a, b, heads, n], a view."""
    return x.permute(2, 3, 1, 0)
