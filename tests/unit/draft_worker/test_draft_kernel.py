"""The compiled kernel attends a draft block as torch does, for every kind of attention a drafter has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_worker import attention
from draft_worker.attention import DraftKv, PagedAttention
from draft_worker.batch import BlockBatch
from draft_worker.shape import DraftShape
from memsvc.device.cpu.kernels import load
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import KindLayout
from tests.support.make_drafter import V1, V2, make_drafter, make_target_stub

PAGE, NUM_PAGES = 4, 120
SLIDING, FULL = "sliding_attention", "full_attention"

DRAFTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (V1, {}),
    "causal": (V1, {"causal": True}),
    "mixed": (V1, {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 11}),
    "window_smaller_than_the_block": (V1, {"layer_types": [SLIDING] * 3, "sliding_window": 5, "is_causal": False}),
    "sliding_causal_with_sink": (V2, {"sliding_window": 9, "is_causal": True, "attention_sink_bias": True}),
}


def run(shape: DraftShape, batch: BlockBatch, pool: KvPool, tables: PageTables) -> torch.Tensor:
    """All layers' outputs for the same random block."""
    torch.manual_seed(1)
    rows = (len(batch), batch.block_size)
    qk = torch.randn(*rows, shape.num_heads + shape.num_kv_heads, shape.head_dim).bfloat16()
    v = torch.randn(*rows, shape.num_kv_heads, shape.head_dim).bfloat16()
    sink = torch.randn(shape.num_heads).bfloat16() if shape.attention_sink_bias else None
    attend = PagedAttention(shape, DraftKv(pool, tables, torch.bfloat16), batch)
    layers = range(shape.num_layers)
    return torch.stack([attend(i, qk[:, :, : shape.num_heads], qk[:, :, shape.num_heads :], v, sink) for i in layers])


@pytest.mark.skipif(load() is None, reason="the CPU kernels are not built, or not for this CPU")
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_kernel_and_torch_agree_about_a_block(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version, overrides = DRAFTERS[name]
    target = make_target_stub(tmp_path / "target")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    shape = DraftShape.from_folder(make_drafter(tmp_path / "drafter", target, version, **heads, **overrides))
    form = KvShape(num_layers=shape.num_layers, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    page_bytes = form.token_bytes * PAGE
    kind = KindLayout("draft_kv", page_bytes, PAGE, 0, 0, 1, page_bytes + 256, NUM_PAGES)
    pool = KvPool(torch.full((kind.stride_bytes * NUM_PAGES,), 0xFF, dtype=torch.uint8), kind, form)
    tables = PageTables(max_reqs=8, max_pages=30, page_size=PAGE)
    free = iter(range(1, NUM_PAGES))
    contexts = [(23, 0), (4, 0), (0, 0), (33, 18), (8, 3), (90, 0)]
    for rid, (length, start) in enumerate(contexts):
        row = tables.add(ReqId(rid))
        tables.set_row(ReqId(rid), [PageId(next(free)) for _ in range(-(-length // PAGE))])
        for layer in range(shape.num_layers):
            kv = torch.randn(2, length - start, 2, 16).bfloat16()
            pool.write(layer, tables.slots(row, start, length - start), kv[0], kv[1])
    batch = BlockBatch(
        rows=np.array([tables.row(ReqId(rid)) for rid in range(len(contexts))]),
        anchors=np.arange(len(contexts)),
        anchor_pos=np.array([length for length, _ in contexts]),
        context_start=np.array([start for _, start in contexts]),
        num_drafts=7,
    )
    with torch.inference_mode():
        got = run(shape, batch, pool, tables)
        monkeypatch.setattr(attention, "kernels_for", lambda _: None)
        want = run(shape, batch, pool, tables)
    assert got.isfinite().all()
    assert not torch.equal(got, want)
    assert (got.float() - want.float()).abs().max() < 1.6e-2 * want.abs().max()
