"""Prompt chunks over pages against dense attention in float64, among pages full of NaN."""

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.kernels.attention_tiles import Tile
from memsvc.device.kernels.prefill_attention import PrefillPlan, prefill_attention
from tests.support.paged_context import Heads, dense_attention, paged_context

SMALL = Tile(16, 4, 2)
HEADS = Heads(num_kv_heads=1, group=3)


@dataclass(frozen=True)
class Span:
    table_row: int
    start: int
    num: int
    first: int

    @property
    def end(self):
        return self.start + self.num


def check(heads, shapes, device, *, window=0, dtype=torch.float32, tile=SMALL):
    """shapes: (start, num) of each request."""
    paged = paged_context(heads, [start + num for start, num in shapes], dtype=dtype, device=device)
    spans, first = [], 0
    for row, (start, num) in zip(paged.context.members.tolist(), shapes, strict=True):
        spans.append(Span(row, start, num, first))
        first += num
    # Views of a wider projection.
    q = torch.randn(first, heads.num_heads + 2, heads.dim, device=device).to(dtype)[:, 1:-1]
    plan = PrefillPlan.of(spans, heads.group, device)
    pages = paged.k_pages, paged.v_pages
    got = prefill_attention(q, pages, paged.context.page_table, plan, window=window, tile=tile)
    assert got.isfinite().all()
    for span, k, v in zip(spans, paged.keys, paged.values, strict=True):
        at, rows = torch.arange(span.end), torch.arange(span.start, span.end)[:, None]
        seen = (at <= rows) & ((rows - at < window) if window else (at >= 0))
        rows = slice(span.first, span.first + span.num)
        want = dense_attention(q[rows], k, v, seen.to(device), heads.dim**-0.5)
        assert (got[rows].double() - want).abs().max() < {torch.float32: 1e-5, torch.bfloat16: 2.5e-2}[dtype]


@pytest.mark.parametrize("window", [0, 1, 7])
def test_each_token_sees_its_prompt_up_to_itself(device, window):
    torch.manual_seed(0)
    check(HEADS, [(0, 1), (17, 50), (0, 45), (33, 1)], device, window=window)


@pytest.mark.parametrize("heads", [replace(HEADS, group=1, page=1), replace(HEADS, num_kv_heads=2, dim=40, page=16)])
def test_pages_and_heads_of_any_size(device, heads):
    torch.manual_seed(1)
    check(heads, [(5, 9), (0, 60)], device)


def test_bfloat16_is_summed_in_float32(device):
    torch.manual_seed(2)
    check(HEADS, [(20, 44)], device, dtype=torch.bfloat16)


@pytest.mark.parametrize("tile", [None, Tile(64, 4, 3)])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_long_prompts_in_chunks(tile):
    torch.manual_seed(3)
    shapes = [(0, 2048), (30_000, 700), (4095, 1)]
    check(Heads(num_kv_heads=2, group=4, dim=128, page=16), shapes, "cuda", dtype=torch.bfloat16, tile=tile)


def test_a_span_is_cut_into_tiles_and_the_longest_to_read_come_first():
    plan = PrefillPlan.of([Span(2, 10, 50, 0), Span(1, 500, 3, 50)], 6, "cpu")
    assert plan.tiles.tolist() == [[1, 500, 3, 50], [2, 52, 8, 42], [2, 31, 21, 21], [2, 10, 21, 0]]


def test_a_tile_without_tokens_reads_nothing_and_writes_nothing(device, monkeypatch):
    torch.manual_seed(4)
    paged = paged_context(HEADS, [9], dtype=torch.float32, device=device)
    q = torch.randn(12, 3, 16, device=device)
    # Rows 0, 1 and 11 are nobody's, and tiles of nobody name row 0 and the first slot.
    plan = PrefillPlan.of([Span(int(paged.context.members[0]), 0, 9, 2)], 3, device)
    plan = PrefillPlan(torch.cat((plan.tiles, torch.zeros_like(plan.tiles).repeat(3, 1))), 3)
    empty = torch.empty
    with monkeypatch.context() as patches:
        patches.setattr(torch, "empty", lambda *size, **kinds: empty(*size, **kinds).fill_(5.0))
        got = prefill_attention(q, (paged.k_pages, paged.v_pages), paged.context.page_table, plan, tile=SMALL)
    assert bool((got[[0, 1, 11]] == 5.0).all())
    rows = torch.arange(9, device=device)
    want = dense_attention(q[2:11], paged.keys[0], paged.values[0], rows <= rows[:, None], 16**-0.5)
    assert (got[2:11].double() - want).abs().max() < 1e-5


def test_mistakes_are_named(device):
    paged = paged_context(HEADS, [4], dtype=torch.float32, device=device)
    q = torch.randn(4, 4, 16, device=device)
    plan = PrefillPlan.of([Span(1, 0, 4, 0)], 3, device)
    with pytest.raises(ValueError, match="4 query heads over 1 with a plan for 3"):
        prefill_attention(q, (paged.k_pages, paged.v_pages), paged.context.page_table, plan)
    with pytest.raises(ValueError, match="one dtype"):
        prefill_attention(q[:, :3].half(), (paged.k_pages, paged.v_pages), paged.context.page_table, plan)
    with pytest.raises(ValueError, match="200 query heads"):
        PrefillPlan.of([], 200, device)
