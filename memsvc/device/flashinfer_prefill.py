"""FlashInfer's paged prefill attention: planned on the host from CPU tensors, for eager calls.

Kernels come as .so files, one for each (head_dim, window or not) and dtype, of two makes: fa3 for Hopper, and fa2 for
all devices, which takes pages in e4m3 beside rows in 16 bits. Nothing is compiled here. flashinfer is imported by the
first FlashInferPrefill, not by this module.
"""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from memsvc.device.attention_backends import Abilities, AttentionCase, RowSpan, Use
from memsvc.device.fp8 import E4M3

__all__ = ["FLASHINFER", "WORKSPACE_BYTES", "FlashInferPrefill", "kernel_name"]

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer advises for partial results. One workspace serves all layers and plans of a stream."""

_SHORT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_SHORT_PAGES = _SHORT_DTYPES | {E4M3: "e4m3"}
_NUM_WRAPPERS = 2


def kernel_name(case: AttentionCase, kernel: str) -> str:
    """Folder and file under flashinfer/data/aot that serves a case. kernel: fa2 or fa3."""
    short, pages, dim = _SHORT_DTYPES[case.dtype], _SHORT_PAGES[case.page_dtype], case.head_dim
    return (
        f"batch_prefill_with_kv_cache_dtype_q_{short}_dtype_kv_{pages}_dtype_o_{short}_dtype_idx_i32"
        f"_head_dim_qk_{dim}_head_dim_vo_{dim}_posenc_0_use_swa_{case.window > 0}_use_logits_cap_False"
        f"_f16qk_False{'_sm90' if kernel == 'fa3' else ''}"
    )


def _lacks(case: AttentionCase, kernel: str) -> str | None:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return "flashinfer is not installed"
    name = kernel_name(case, kernel)
    built = Path(spec.origin).parent / "data" / "aot" / name / f"{name}.so"
    return None if built.exists() else f"FlashInfer's kernel {name}.so is not built"


def _abilities(
    kernel: str, *, capabilities: frozenset[int] = frozenset(), kv_dtypes: frozenset[torch.dtype] = frozenset()
) -> Abilities:
    return Abilities(
        uses=frozenset({Use.EAGER}),
        devices=frozenset({"cuda"}),
        dtypes=frozenset(_SHORT_DTYPES),
        head_dims=frozenset({64, 128, 256}),
        capabilities=capabilities,
        sinks=False,
        kv_dtypes=kv_dtypes,
        missing=lambda case: _lacks(case, kernel),
    )


FLASHINFER = {
    "fa2": _abilities("fa2", kv_dtypes=frozenset({E4M3})),
    "fa3": _abilities("fa3", capabilities=frozenset({9})),
}
"""By kernel."""


class FlashInferPrefill:
    """Attention of a batch's rows over pages, for one shape of heads: plan once a forward, run in every layer.

    A plan is copied to the device from pinned memory of its wrapper, which the next plan overwrites: so two wrappers
    take turns, and one is planned again only when its last copy has arrived.
    """

    def __init__(
        self, case: AttentionCase, workspace: torch.Tensor, *, kernel: str, scale: float | None = None
    ) -> None:
        """workspace: uint8 on the device, the caller's; WORKSPACE_BYTES is enough.

        kernel: fa2, or fa3 (Hopper). fa3 is 1.2 to 1.8 times faster for prompts, fa2 1.6 to 3 times for 9 rows of 4
        query heads (H200, docs/benchmarks/attention-h200.json).
        """
        # Without this a kernel that is not built would be compiled, in minutes, in the middle of a request.
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
        make = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._case = case
        self._scale = scale
        self._wrappers: list[Any] = [make(workspace, "NHD", backend=kernel) for _ in range(_NUM_WRAPPERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_WRAPPERS
        self._current = 0

    def plan(self, spans: Sequence[RowSpan], table: torch.Tensor) -> None:
        """The next runs are for these spans, whose rows lie one after another; table int32 [rows, max_pages], host.

        A window or causality is the case's. The keys and values of the spans themselves are in the pages when run.
        """
        assert table.device.type == "cpu", f"a plan from a table on {table.device} would wait for it"
        page = self._case.page_size
        ends = [span.start + span.num for span in spans]
        counts = [-(-end // page) for end in ends]
        pages = [table[span.table_row, :count] for span, count in zip(spans, counts, strict=True)]
        self._current = (self._current + 1) % _NUM_WRAPPERS
        copied = self._copied[self._current]
        if copied is not None:
            copied.synchronize()
        case = self._case
        self._wrappers[self._current].plan(
            _offsets([span.num for span in spans]),
            _offsets(counts),
            torch.cat(pages).int(),
            torch.tensor(
                [end - (count - 1) * page for end, count in zip(ends, counts, strict=True)], dtype=torch.int32
            ),
            case.num_heads,
            case.num_kv_heads,
            case.head_dim,
            page,
            causal=case.causal,
            sm_scale=self._scale,
            # It counts the positions before the row's own.
            window_left=case.window - 1 if case.window else -1,
            q_data_type=case.dtype,
            kv_data_type=case.page_dtype,
        )
        if case.device == "cuda":
            self._copied[self._current] = torch.cuda.Event()
            self._copied[self._current].record()  # type: ignore[union-attr]

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[rows, heads, d] of q [rows, heads, d] over pages of keys and values, each [pages, page, kv_heads, d]."""
        q = q.contiguous()
        # An output of its own would be zeroed first, for rows that see nothing: there are none here.
        return self._wrappers[self._current].run(q, pages, out=torch.empty_like(q))


def _offsets(counts: Sequence[int]) -> torch.Tensor:
    """int32 [len + 1]: where each begins, and the end."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
