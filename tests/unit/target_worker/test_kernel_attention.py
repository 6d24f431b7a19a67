"""Few rows go to the compiled kernel, prompt chunks to torch, both into one result."""

import pytest
import torch

from memsvc.device.cpu.kernels import load
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import KindLayout
from target_worker import attention
from target_worker.attention import KERNEL_ROWS, PagedAttention, Span

KV_HEADS, GROUP, DIM, PAGE = 3, 3, 64, 16

SPANS = {
    "mixed": [(0, 1), (149, 4), (0, 40), (70, 8), (33, KERNEL_ROWS), (100, KERNEL_ROWS + 1), (300, 1)],
    "few": [(149, 4), (150, 4)],
    "chunks": [(0, 40), (16, 300)],
}


@pytest.mark.skipif(load() is None, reason="the CPU kernels are not built, or not for this CPU")
@pytest.mark.parametrize("name", SPANS)
def test_the_kernel_and_torch_agree_about_a_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shape = KvShape(num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.bfloat16)
    page_bytes, num_pages = shape.token_bytes * PAGE, 100
    kind = KindLayout("target_kv", page_bytes, PAGE, 0, 0, 1, page_bytes, num_pages)
    pool = KvPool(torch.full((page_bytes * num_pages,), 0xFF, dtype=torch.uint8), kind, shape)
    tables = PageTables(max_reqs=8, max_pages=30, page_size=PAGE)
    free, spans, first = iter(range(1, num_pages)), [], 0
    for rid, (start, num) in enumerate(SPANS[name]):
        row = tables.add(ReqId(rid))
        tables.set_row(ReqId(rid), [PageId(next(free)) for _ in range(-(-(start + num) // PAGE))])
        k, v = torch.randn(2, start + num, KV_HEADS, DIM).bfloat16()
        pool.write(0, tables.slots(row, 0, start + num), k, v)
        spans.append(Span(row, start, num, first))
        first += num
    q = torch.randn(first, KV_HEADS * GROUP, DIM).bfloat16()
    with torch.inference_mode():
        got = PagedAttention(pool, tables, spans, KV_HEADS * GROUP, q.dtype).run(0, q)
        monkeypatch.setattr(attention, "kernels_for", lambda _: None)
        want = PagedAttention(pool, tables, spans, KV_HEADS * GROUP, q.dtype).run(0, q)
    assert (got.float() - want.float()).abs().max() < 1.6e-2 * want.abs().max()
    chunk_rows = torch.cat([torch.full((num,), num > KERNEL_ROWS) for _, num in SPANS[name]])
    assert torch.equal(got[chunk_rows], want[chunk_rows])
    assert torch.equal(got, want) == (name == "chunks")
