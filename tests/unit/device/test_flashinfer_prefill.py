"""FlashInfer's prefill: what is planned, from where, and on which wrapper; on CUDA also what comes out."""

import os
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from memsvc.device.attention_backends import AttentionCase, Use
from memsvc.device.flashinfer_prefill import FLASHINFER, WORKSPACE_BYTES, FlashInferPrefill
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.wire.mem import KindLayout

CASE = AttentionCase(
    use=Use.EAGER, device="cpu", dtype=torch.bfloat16, num_heads=4, num_kv_heads=2, head_dim=64, page_size=16,
    num_rows=64,
)  # fmt: skip


@dataclass(frozen=True)
class Span:
    table_row: int
    start: int
    num: int


SPANS = [Span(2, 0, 20), Span(1, 16, 16), Span(3, 40, 1)]


class FakeWrapper:
    made: ClassVar[list["FakeWrapper"]] = []

    def __init__(self, workspace, layout, backend):
        self.workspace, self.layout, self.backend = workspace, layout, backend
        self.plans, self.runs = [], []
        FakeWrapper.made.append(self)

    def plan(self, *columns, **options):
        self.plans.append((columns, options))

    def run(self, q, pages, out):
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        self.runs.append((q, pages))
        self.out = out
        return out


@pytest.fixture
def wrappers(monkeypatch):
    monkeypatch.setattr(FakeWrapper, "made", [])
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=FakeWrapper))
    # Set first, so that it is put back as it was.
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "0")
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    return FakeWrapper.made


def test_a_plan_is_made_of_host_tensors_and_names_the_pages_each_span_sees(wrappers):
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    prefill = FlashInferPrefill(replace(CASE, window=2048), torch.empty(8, dtype=torch.uint8), kernel="fa2")
    prefill.plan(SPANS, table)
    ((columns, options),) = next(w for w in wrappers if w.plans).plans
    rows, counts, pages, last = columns[:4]
    assert rows.tolist() == [0, 20, 36, 37]
    assert counts.tolist() == [0, 2, 4, 7]
    assert pages.tolist() == [20, 21, 10, 11, 30, 31, 32]
    assert last.tolist() == [4, 16, 9]
    assert {x.dtype for x in columns[:4]} == {torch.int32}
    assert {x.device.type for x in columns[:4]} == {"cpu"}
    assert columns[4:] == (4, 2, 64, 16)
    assert options["window_left"] == 2047
    assert options["causal"] is True
    assert options["q_data_type"] == options["kv_data_type"] == torch.bfloat16


def test_pages_in_8_bits_are_named_in_the_plan(wrappers):
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    case = replace(CASE, kv_dtype=torch.float8_e4m3fn)
    prefill = FlashInferPrefill(case, torch.empty(8, dtype=torch.uint8), kernel="fa2")
    prefill.plan(SPANS, table)
    ((_, options),) = next(w for w in wrappers if w.plans).plans
    assert (options["q_data_type"], options["kv_data_type"]) == (torch.bfloat16, torch.float8_e4m3fn)


def test_two_wrappers_over_one_workspace_take_turns_and_the_planned_one_runs(wrappers):
    workspace = torch.empty(8, dtype=torch.uint8)
    prefill = FlashInferPrefill(CASE, workspace, kernel="fa3")
    assert [(w.workspace is workspace, w.layout, w.backend) for w in wrappers] == [(True, "NHD", "fa3")] * 2
    table = torch.zeros((4, 10), dtype=torch.int32)
    for turn in range(4):
        before = [len(w.runs) for w in wrappers]
        prefill.plan(SPANS, table)
        found = prefill.run(torch.zeros(37, 4, 64), (table, table))
        assert found is wrappers[1 - turn % 2].out
        assert [len(w.runs) - b for w, b in zip(wrappers, before, strict=True)] == [turn % 2, 1 - turn % 2]
    assert [len(w.plans) for w in wrappers] == [2, 2]
    assert wrappers[0].plans[0][1]["window_left"] == -1


def test_nothing_is_ever_compiled_on_the_serving_host(wrappers):
    FlashInferPrefill(CASE, torch.empty(8, dtype=torch.uint8), kernel="fa2")
    assert os.environ["FLASHINFER_DISABLE_JIT"] == "1"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernel", FLASHINFER)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_equal_dense_attention_over_poisoned_strided_pages(head_dim, window, kernel, kv_dtype):
    from tests.support.paged_context import dense_attention

    capability = torch.cuda.get_device_capability()[0]
    case = replace(CASE, device="cuda", head_dim=head_dim, window=window, capability=capability, kv_dtype=kv_dtype)
    if reasons := FLASHINFER[kernel].refusals(case):
        pytest.skip(reasons[0])
    torch.manual_seed(0)
    shape = KvShape(num_layers=3, num_kv_heads=2, head_dim=head_dim, dtype=kv_dtype)
    page_bytes = shape.token_bytes * 16
    kind = KindLayout("target_kv", page_bytes, 16, 0, 0, 1, page_bytes + 256, 200)
    pool = KvPool(torch.full((kind.stride_bytes * 200,), 0xFF, dtype=torch.uint8, device="cuda"), kind, shape)
    table = (torch.randperm(199)[:96] + 1).int().view(3, 32)
    spans = [Span(0, 0, 300), Span(2, 400, 17), Span(1, 99, 1)]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    prefill = FlashInferPrefill(case, workspace, kernel=kernel)
    for _ in range(3):
        q = torch.randn(318, 4, head_dim, device="cuda").bfloat16()
        prefill.plan(spans, table)
        want = []
        for span, rows in zip(spans, q.split([300, 17, 1]), strict=True):
            end = span.start + span.num
            k, v = torch.randn(2, end, 2, head_dim, device="cuda").bfloat16()
            at = torch.arange(end)
            slots = table[span.table_row].long()[at // 16] * 16 + at % 16
            pool.write(1, slots.cuda(), k, v)
            behind = (torch.arange(span.start, end)[:, None] - at).cuda()
            seen = (behind >= 0) & ((behind < window) if window else (behind >= 0))
            # Of e4m3 pages, what those hold; none of these is past 448.
            k, v = (x.to(kv_dtype).to(case.dtype) for x in (k, v))
            want.append(dense_attention(rows, k, v, seen, head_dim**-0.5))
        got = prefill.run(q, (pool.k(1), pool.v(1)))
        assert (got.double() - torch.cat(want)).abs().max() < 2.5e-2
