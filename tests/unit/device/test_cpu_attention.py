"""The attention kernel against dense attention in float64, on pages full of NaN."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from memsvc.device.cpu.attention import BLOCK_ROWS, KernelPlan, Rows, row_blocks, takes
from memsvc.device.cpu.kernels import Kernels, load
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.page_table import PageTables
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import KindLayout

ROUTES = loaded.attentions if (loaded := load()) else ["dot"]
TOLERANCE = 8e-3
"""Values are about one: the output's last bit is 2^-8, and so is that of a weight."""


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=ROUTES)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The kernels, on each route that this CPU has."""
    loaded = load()
    if loaded is None:
        pytest.skip("the CPU kernels are not built, or not for this CPU")
    monkeypatch.setattr(loaded, "attention", request.param)
    return loaded


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: rows of requests at (position of row 0, number of rows), and how they see."""

    spans: tuple[tuple[int, int], ...] = ((0, 1), (3, 5), (149, 4), (70, 8), (0, 16), (255, 1), (600, 3))
    page_size: int = 16
    kv_heads: int = 3
    group_size: int = 3
    head_dim: int = 64
    causal: bool = True
    window: int = 0
    low: int = 0
    own: bool = False
    sink: bool = False


CASES = {
    "smollm2": Case(),
    "pages_of_one_token": Case(page_size=1),
    "odd_pages": Case(page_size=7, kv_heads=2),
    "no_groups": Case(group_size=1),
    "odd_groups": Case(group_size=5, kv_heads=1),
    "large_groups": Case(group_size=16, kv_heads=2),
    "narrow_heads": Case(head_dim=16),
    "heads_of_80": Case(head_dim=80),
    "heads_of_96": Case(head_dim=96, group_size=4),
    "heads_of_128": Case(head_dim=128, group_size=4, kv_heads=2),
    "widest_heads": Case(head_dim=256, group_size=2, kv_heads=1),
    "many_heads": Case(kv_heads=9, group_size=2),
    "sliding": Case(window=20),
    "sliding_over_chunks": Case(window=300, spans=((700, 4), (299, 2), (5, 7))),
    "low": Case(low=13, spans=((40, 2), (13, 4), (400, 8))),
    "block": Case(own=True, causal=False),
    "block_causal": Case(own=True),
    "block_sliding": Case(own=True, causal=False, window=5),
    "block_sliding_causal": Case(own=True, window=14),
    "block_late_start": Case(own=True, causal=False, low=60, spans=((70, 8), (60, 8), (300, 8))),
    "block_with_sink": Case(own=True, causal=False, sink=True, group_size=2),
    "block_without_context": Case(own=True, causal=False, spans=((0, 8), (0, 1))),
}


class Batch:
    """Random queries, keys and values of a case: those of pages lie there, all other bytes are NaN."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(len(case.spans) + case.head_dim)
        self.case = case
        shape = KvShape(num_layers=2, num_kv_heads=case.kv_heads, head_dim=case.head_dim, dtype=torch.bfloat16)
        needs = [-(-(pos + num) // case.page_size) for pos, num in case.spans]
        page_bytes, num_pages = shape.token_bytes * case.page_size, sum(needs) + 1
        kind = KindLayout("target_kv", page_bytes, case.page_size, 0, 0, 1, page_bytes + 64, num_pages)
        self.pool = KvPool(torch.full((kind.stride_bytes * num_pages,), 0xFF, dtype=torch.uint8), kind, shape)
        self.tables = PageTables(max_reqs=len(needs), max_pages=max(needs), page_size=case.page_size)
        free = iter((torch.randperm(num_pages - 1) + 1).tolist())
        total, heads = sum(num for _, num in case.spans), case.kv_heads * case.group_size
        # Of a wider matrix, as a projection leaves them.
        self.q = torch.randn(total, heads + 2, case.head_dim).bfloat16()[:, :heads]
        self.own = [torch.randn(total, case.kv_heads + 3, case.head_dim).bfloat16()[:, 2:-1] for _ in range(2)]
        self.sink = torch.randn(heads).bfloat16() if case.sink else None
        self.keys, self.values, self.table_rows, first = [], [], [], 0
        for rid, (pos, num) in enumerate(case.spans):
            row = self.tables.add(ReqId(rid))
            self.tables.set_row(ReqId(rid), [PageId(next(free)) for _ in range(needs[rid])])
            k, v = torch.randn(2, pos + num, case.kv_heads, case.head_dim).bfloat16()
            k[pos:], v[pos:] = (x[first : first + num] for x in self.own)
            low, high = min(case.low, pos), pos if case.own else pos + num
            self.pool.write(1, self.tables.slots(row, low, high - low), k[low:high], v[low:high])
            self.keys.append(k), self.values.append(v), self.table_rows.append(row)
            first += num

    def rows(self) -> Rows:
        positions, nums = np.array(self.case.spans, dtype=np.int64).T
        return Rows(
            table_rows=np.array(self.table_rows),
            firsts=np.cumsum(nums) - nums,
            nums=nums,
            lows=np.minimum(self.case.low, positions),
            positions=positions,
        )

    def by_kernel(self, kernels: Kernels) -> torch.Tensor:
        """[rows, heads, d]"""
        case = self.case
        plan = KernelPlan(self.pool, self.tables, self.rows(), self.q.shape[1], causal=case.causal, window=case.window)
        out = torch.full_like(self.q, torch.nan)
        call = plan.at(1, self.q, out)
        kernels.attend(plan.with_own(call, *self.own, self.sink) if case.own else call)
        return out

    def dense(self) -> torch.Tensor:
        """The same in float64."""
        first, outs = 0, []
        for (pos, num), k, v in zip(self.case.spans, self.keys, self.values, strict=True):
            k, v = (x.double().repeat_interleave(self.case.group_size, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", self.q[first : first + num].double(), k) * self.case.head_dim**-0.5
            scores = scores.masked_fill(~self.seen(pos, num), -torch.inf)
            if self.sink is not None:
                sink = self.sink.double()[:, None, None].expand(-1, num, 1)
                scores = torch.cat((scores, sink), dim=2)
                v = torch.cat((v, torch.zeros_like(v[:1])))
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
            first += num
        return torch.cat(outs)

    def seen(self, pos: int, num: int) -> torch.Tensor:
        """bool [num, pos + num]"""
        at, keys = pos + torch.arange(num)[:, None], torch.arange(pos + num)
        seen = keys >= min(self.case.low, pos)
        if self.case.causal:
            seen = seen & (keys <= at)
        if self.case.window:
            seen = seen & ((at - keys).abs() < self.case.window)
        return seen.expand(num, -1)


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_dense_attention_over_poisoned_pages(kernels: Kernels, name: str) -> None:
    batch = Batch(CASES[name])
    got, want = batch.by_kernel(kernels), batch.dense()
    assert got.isfinite().all()
    assert (got.double() - want).abs().max() < TOLERANCE * want.abs().max()


def test_a_mean_over_many_keys_is_exact_to_the_last_bit_of_the_output(kernels: Kernels) -> None:
    # Equal scores: what is left is the sum of 3,000 values in float32.
    batch = Batch(Case(spans=((2999, 1), (1500, 2)), page_size=32))
    batch.q.zero_()
    got, want = batch.by_kernel(kernels), batch.dense()
    assert (got.double() - want).abs().max() < 3e-4


def test_large_scores_neither_overflow_nor_lose_the_largest(kernels: Kernels) -> None:
    batch = Batch(Case(spans=((700, 4),)))
    batch.q.mul_(300)
    got, want = batch.by_kernel(kernels), batch.dense()
    assert (got.double() - want).abs().max() < TOLERANCE * want.abs().max()


@pytest.mark.parametrize("name", ["smollm2", "block_sliding"])
def test_two_threads_give_the_bits_of_one(kernels: Kernels, name: str) -> None:
    batch, found, threads = Batch(CASES[name]), [], torch.get_num_threads()
    try:
        for num in (1, 2):
            torch.set_num_threads(num)
            found.append(batch.by_kernel(kernels))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(kernels: Kernels) -> None:
    batch = Batch(Case(spans=((149, 4), (70, 8), (600, 3))))
    whole = batch.by_kernel(kernels)
    batch.table_rows, batch.q, batch.case = batch.table_rows[:1], batch.q[:4], replace(batch.case, spans=((149, 4),))
    assert torch.equal(batch.by_kernel(kernels), whole[:4])


@pytest.mark.parametrize("page", [-1, 10_000])
def test_a_page_that_does_not_exist_is_never_read(kernels: Kernels, page: int) -> None:
    batch = Batch(CASES["smollm2"])
    batch.tables.table[batch.table_rows[2], 3] = page
    with pytest.raises(AssertionError, match="names a page outside"):
        batch.by_kernel(kernels)


def test_rows_of_a_request_are_cut_into_equal_parts_of_whole_quads() -> None:
    nums = np.array([1, 8, 5, 16, 6])
    firsts = np.cumsum(nums) - nums
    rows = Rows(table_rows=firsts + 1, firsts=firsts, nums=nums, lows=firsts * 0, positions=firsts + 100)
    for group_size in (1, 3, 7):
        blocks = row_blocks(rows, group_size)
        for first, num in zip(firsts, nums, strict=True):
            mine = blocks[blocks[:, 1] == first]
            assert (mine[:, :5] == [first + 1, first, num, 0, first + 100]).all()
            assert mine[0, 5] == 0
            assert mine[-1, 6] == num * group_size
            assert (mine[1:, 5] == mine[:-1, 6]).all()
            assert (mine[:, 6] - mine[:, 5] <= BLOCK_ROWS).all()
            assert (mine[:, 5] % 4 == 0).all()


@pytest.mark.parametrize(("head_dim", "is_taken"), [(64, True), (256, True), (20, False), (272, False)])
def test_pages_of_odd_heads_stay_with_torch(head_dim: int, is_taken: bool) -> None:
    assert takes(Batch(Case(head_dim=head_dim, spans=((3, 1),))).pool) is is_taken


def test_a_key_or_query_that_is_no_number_shows_in_the_output(kernels: Kernels) -> None:
    batch = Batch(Case(spans=((60, 1), (60, 1)), group_size=3))
    slot = batch.tables.slots(batch.table_rows[0], 10, 1)
    batch.pool.k(1)[slot // 16, slot % 16, 1, 5] = torch.nan
    out = batch.by_kernel(kernels)
    # Of the first request, the heads that read this key head.
    lost = torch.isnan(out)
    assert lost[0, 3:6].all()
    assert not lost[0, :3].any()
    assert not lost[0, 6:].any()
    assert not lost[1].any()
    batch = Batch(Case(spans=((60, 1),)))
    batch.q[0, 2, 7] = torch.nan
    lost = torch.isnan(batch.by_kernel(kernels))
    assert lost[0, 2].all()
    assert lost.sum() == 64
