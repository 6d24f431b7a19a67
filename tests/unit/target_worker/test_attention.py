"""Paged attention against dense attention, on pages full of NaN."""

import pytest
import torch

from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import KindLayout
from target_worker import attention
from target_worker.attention import TILE_ROWS, PagedAttention, Span, group_spans

PAGE, KV_HEADS, DIM = 4, 2, 8


def make_pool(num_pages: int, dtype: torch.dtype = torch.float32) -> KvPool:
    shape = KvShape(num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype)
    page_bytes = shape.token_bytes * PAGE
    kind = KindLayout("target_kv", page_bytes, PAGE, 0, 0, 1, page_bytes + 64, num_pages)
    return KvPool(torch.full((kind.stride_bytes * num_pages,), 0xFF, dtype=torch.uint8), kind, shape)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """q [num, heads, d] at positions start.. over k, v [start + num, kv_heads, d], in float64."""
    num, heads, dim = q.shape
    k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * dim**-0.5
    seen = torch.arange(len(k))[None] <= start + torch.arange(num)[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(num, heads * dim)


@pytest.mark.parametrize("group_size", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_equals_dense_attention_over_poisoned_pages(group_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool = make_pool(200, dtype)
    tables = PageTables(max_reqs=8, max_pages=60, page_size=PAGE)
    pages = iter((torch.randperm(199) + 1).tolist())
    shapes = [(0, 1), (3, 5), (4, 4), (117, 8), (40, 8), (0, 33), (55, 1), (90, 8)]
    spans, want, q_rows, first = [], [], [], 0
    for rid, (start, num) in enumerate(shapes):
        row = tables.add(ReqId(rid))
        tables.set_row(ReqId(rid), [PageId(next(pages)) for _ in range(-(-(start + num) // PAGE))])
        k, v = torch.randn(2, start + num, KV_HEADS, DIM).to(dtype)
        q = torch.randn(num, KV_HEADS * group_size, DIM).to(dtype)
        pool.write(1, tables.slots(row, 0, start + num), k, v)
        spans.append(Span(row, start, num, first))
        want.append(dense(q, k, v, start))
        q_rows.append(q)
        first += num
    got = PagedAttention(pool, tables, spans, KV_HEADS * group_size, dtype).run(1, torch.cat(q_rows))
    assert got.isfinite().all()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (got.double() - torch.cat(want)).abs().max() < tolerance


def test_a_batch_cut_into_parts_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    pool = make_pool(60)
    tables = PageTables(max_reqs=8, max_pages=12, page_size=PAGE)
    pages = iter((torch.randperm(59) + 1).tolist())
    spans = []
    for rid, start in enumerate((17, 15, 18, 16, 14)):
        row = tables.add(ReqId(rid))
        tables.set_row(ReqId(rid), [PageId(next(pages)) for _ in range(6)])
        pool.write(0, tables.slots(row, 0, start + 2), *torch.randn(2, start + 2, KV_HEADS, DIM))
        spans.append(Span(row, start, 2, 2 * rid))
    q = torch.randn(10, 4, DIM)
    whole = PagedAttention(pool, tables, spans, 4, q.dtype).run(0, q)
    page_bytes = 2 * PAGE * KV_HEADS * DIM * 4
    for num_pages in (1, 10, 14):
        monkeypatch.setattr(attention, "SCRATCH_BYTES", num_pages * page_bytes)
        assert torch.equal(PagedAttention(pool, tables, spans, 4, q.dtype).run(0, q), whole)


def test_parts_follow_the_batch_and_hold_so_many_pages_at_most() -> None:
    spans = [Span(1 + i, 100 + 16 * (i % 3), 1, i) for i in range(20)]
    parts = group_spans(spans, page_size=16, max_pages=64)
    assert [span.first for part in parts for span in part] == list(range(20))
    assert [len(part) for part in parts] == [7, 7, 6]
    alone = group_spans(spans, page_size=16, max_pages=3)
    assert [len(part) for part in alone] == [1] * 20


def test_a_row_of_the_dummy_request_does_not_disturb_the_others() -> None:
    pool = make_pool(8)
    tables = PageTables(max_reqs=2, max_pages=2, page_size=PAGE)
    row = tables.add(ReqId(1))
    tables.set_row(ReqId(1), [PageId(5)])
    k, v = torch.randn(2, 3, KV_HEADS, DIM)
    q = torch.randn(2, 4, DIM)
    pool.write(0, tables.slots(row, 0, 3), k, v)
    pool.write(0, tables.slots(0, 0, 1), torch.zeros(1, KV_HEADS, DIM), torch.zeros(1, KV_HEADS, DIM))
    got = PagedAttention(pool, tables, [Span(0, 0, 1, 0), Span(row, 2, 1, 1)], 4, q.dtype).run(0, q)
    assert (got[1:].double() - dense(q[1:], k, v, 2)).abs().max() < 1e-5
    assert got.isfinite().all()


def test_groups_cover_every_row_once_and_pad_by_a_quarter_at_most() -> None:
    generator = torch.Generator().manual_seed(1)
    spans, first = [], 0
    for row in range(1, 60):
        start, num = torch.randint(0, 3000, (2,), generator=generator).tolist()
        num = (1, 8, num % 700 + 1)[row % 3]
        spans.append(Span(row, start, num, first))
        first += num
    groups = group_spans(spans, page_size=16, max_pages=10**9)
    rows = sorted(r for group in groups for span in group for r in range(span.first, span.first + span.num))
    assert rows == list(range(first))
    for group in groups:
        pages = [-(-span.end // 16) for span in group]
        assert len({span.num for span in group}) == 1
        assert group[0].num <= TILE_ROWS
        assert max(pages) <= min(pages) * 1.25 + 2
    assert len(groups) < 59
