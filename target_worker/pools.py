"""The target's views into the arena, in the forms that its model needs."""

import torch

from memsvc.device.kv_dtype import kv_torch_name
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.wire.mem import Layout
from target_worker.config import TargetConfig
from target_worker.model.config import TARGET_KV, TargetShape


def kv_pool(arena: torch.Tensor, layout: Layout, shape: TargetShape, config: TargetConfig) -> KvPool:
    """Keys and values of the full-attention layers. Raises ValueError if the layout holds pages of another size."""
    kv_shape = KvShape(
        num_layers=shape.num_full_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=getattr(torch, kv_torch_name(config.kv_cache_dtype, shape.resolve_dtype(config.dtype))),
    )
    kind = next(kind for kind in layout.kinds if kind.name == TARGET_KV)
    return KvPool(arena, kind, kv_shape)


def page_tables(layout: Layout, config: TargetConfig, device: torch.device) -> PageTables:
    """Tables of target_kv for every request that may run, as long as any may get. device: where slots are wanted."""
    return PageTables(
        max_reqs=config.max_running_requests,
        max_pages=-(-(config.context_len + config.block_size) // layout.page_size),
        page_size=layout.page_size,
        device=device,
    )
