"""What attends prompt chunks, as --attention-backend says: each backend in the form that prompts ask for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from memsvc.device.attention_backends import TORCH, TRITON, AttentionBackends, AttentionCase, Use
from memsvc.device.flashinfer_prefill import FLASHINFER, WORKSPACE_BYTES, FlashInferPrefill
from memsvc.device.kv_pool import KvPool
from memsvc.device.page_table import PageTables
from target_worker.attention import PagedAttention, Span
from target_worker.cuda.network import AttendRows
from target_worker.cuda.prompts import PlanPrefill, TritonPrefill
from target_worker.model.config import TargetShape


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillMemory:
    """What is attended."""

    pool: KvPool
    tables: PageTables
    """The host's, with one row for each slot."""
    page_table: torch.Tensor
    """The same on the device."""
    dtype: torch.dtype
    """Of rows; pages may be e4m3."""


def choose_prefill(
    requested: str, shape: TargetShape, memory: PrefillMemory, max_tokens: int
) -> tuple[str, PlanPrefill]:
    """(name, backend) for prompts of at most max_tokens tokens a step. Raises ValueError if requested can't do it."""
    device = memory.page_table.device
    case = AttentionCase(
        use=Use.EAGER,
        device="cuda",
        dtype=memory.dtype,
        kv_dtype=memory.pool.shape.dtype,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=memory.pool.page_size,
        num_rows=max_tokens,
        capability=torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0,
    )
    backends: AttentionBackends[Callable[[], PlanPrefill]] = AttentionBackends()
    backends.offer("torch", TORCH, lambda: _TorchPrefill(memory, shape.num_heads))
    backends.offer("triton", TRITON, lambda: TritonPrefill(memory.pool, memory.page_table, shape.group_size))
    for kernel, abilities in FLASHINFER.items():
        backends.offer(f"flashinfer-{kernel}", abilities, partial(_FlashInfer.of, case, memory, kernel))
    name, make = backends.choose(requested, case)
    return name, make()


@dataclass(frozen=True, slots=True)
class _TorchPrefill:
    """The reference: pages are gathered. The host waits for the device in every plan."""

    memory: PrefillMemory
    num_heads: int

    def __call__(self, spans: Sequence[Span]) -> AttendRows:
        memory = self.memory
        attention = PagedAttention(memory.pool, memory.tables, list(spans), self.num_heads, memory.dtype)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention.run(layer, q).view(q.shape)

        return attend


@dataclass(frozen=True, slots=True)
class _FlashInfer:
    """Planned on the host from its own tables."""

    attention: FlashInferPrefill
    memory: PrefillMemory

    @classmethod
    def of(cls, case: AttentionCase, memory: PrefillMemory, kernel: str) -> "_FlashInfer":
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=memory.page_table.device)
        return cls(FlashInferPrefill(case, workspace, kernel=kernel), memory)

    def __call__(self, spans: Sequence[Span]) -> AttendRows:
        pool = self.memory.pool
        self.attention.plan(spans, self.memory.tables.table)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.attention.run(q, (pool.k(layer), pool.v(layer)))

        return attend
