"""Heads, pages and slots for tests of the kernels that norm, turn and store keys and values."""

import torch

from memsvc.device.hf_config import rope_spec
from memsvc.device.kernels.heads import HeadSpec
from memsvc.device.kernels.places import BlockRows
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.layers import RMSNorm, Rotary, ZeroCentredRMSNorm
from memsvc.wire.mem import KindLayout

PAGE, NUM_PAGES, MAX_PAGES, NUM_SLOTS = 4, 30, 5, 6
EPS = 1e-6


def rotary_of(head_dim: int, device: str, *, fraction: float = 1.0, yarn: bool = False) -> Rotary:
    """Turns that share of a head. yarn: cos and sin carry a factor that is not 1."""
    config: dict[str, object] = {
        "rope_theta": 1e4, "max_position_embeddings": 1 << 18, "partial_rotary_factor": fraction,
    }  # fmt: skip
    if yarn:
        config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    return Rotary(rope_spec(config, head_dim), device)


def head_spec(rotary: Rotary, sizes: tuple[int, int, int], dtype: torch.dtype, **options: object) -> HeadSpec:
    """sizes: heads, kv_heads, head_dim. options: norm = plain, zero-centred or None; value_scale."""
    heads, kv_heads, head_dim = sizes
    kind = {"plain": RMSNorm, "zero-centred": ZeroCentredRMSNorm, None: None}[options.get("norm", "plain")]
    norms = [kind(torch.randn(head_dim).to(rotary.frequencies.device, dtype), EPS) if kind else None for _ in "qk"]
    return HeadSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary=rotary, q_norm=norms[0], k_norm=norms[1],
        value_scale=options.get("value_scale", 1.0),
    )  # fmt: skip


def reference(
    qkv: torch.Tensor, positions: torch.Tensor, spec: HeadSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as the decoders compute them."""
    d, heads, kv_heads = spec.head_dim, spec.num_heads, spec.num_kv_heads
    parts = qkv[:, : (heads + 2 * kv_heads) * d].reshape(len(qkv), -1, d)
    q, k, v = parts.split((heads, kv_heads, kv_heads), dim=1)
    if spec.q_norm is not None and spec.k_norm is not None:
        q, k = spec.q_norm(q), spec.k_norm(k)
    tables = spec.rotary.tables(positions.long(), qkv.dtype)
    v = v if spec.value_scale == 1.0 else v * spec.value_scale
    return spec.rotary.rotate(q, tables), spec.rotary.rotate(k, tables), v


def poisoned_pool(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> KvPool:
    """NUM_PAGES pages of PAGE tokens, with a gap after each, all NaN."""
    shape = KvShape(num_layers=num_layers, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    size = shape.token_bytes * PAGE
    stride = size + 16 * dtype.itemsize
    kind = KindLayout(
        name="kv", page_bytes=size, tokens_per_page=PAGE, pages_per_req=0, window=0, pages_per_frame=1,
        stride_bytes=stride, num_pages=NUM_PAGES,
    )  # fmt: skip
    arena = torch.full((NUM_PAGES * stride // dtype.itemsize,), torch.nan, dtype=dtype, device=device)
    return KvPool(arena.view(torch.uint8), kind, shape)


def ints(values: list[int], device: str) -> torch.Tensor:
    """int32, as everything about slots is."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def block_rows(device: str, block_size: int = 3) -> BlockRows:
    """Slots 4, 0 (the dummy), 2 (done) and 6, whose block runs past the end of its page-table row."""
    rows = torch.zeros(NUM_SLOTS + 1, MAX_PAGES, dtype=torch.int32)
    shuffled = torch.randperm(NUM_PAGES - 1)[: NUM_SLOTS * (MAX_PAGES - 1)] + 1
    rows[1:, : MAX_PAGES - 1] = shuffled.view(NUM_SLOTS, -1)
    rows[6] = rows[6].roll(1)
    return BlockRows(
        members=ints([4, 0, 2, 6], device), lengths=ints([0, 1, 9, 3, 7, 2, MAX_PAGES * PAGE - 1], device),
        block_size=block_size, page_table=rows.to(device), done=ints([1, 0, 1, 0, 0, 0, 0], device),
    )  # fmt: skip


def positions_of(rows: BlockRows) -> torch.Tensor:
    """int64 [N * B]"""
    steps = torch.arange(rows.block_size, device=rows.members.device)
    return (rows.lengths[rows.members.long()][:, None].long() + steps).flatten()


def places_of(rows: BlockRows) -> list[tuple[int, int] | None]:
    """(page, offset) of each row; None for those that go to page 0."""
    assert rows.page_table is not None
    assert rows.done is not None
    found: list[tuple[int, int] | None] = []
    for member in rows.members.tolist():
        for step in range(rows.block_size):
            position = int(rows.lengths[member]) + step
            index = position // PAGE
            belongs = member and not int(rows.done[member]) and index < MAX_PAGES
            found.append((int(rows.page_table[member, index]), position % PAGE) if belongs else None)
    return found
