"""Attention kernels over e4m3 pages against dense attention in float64 over the numbers those hold, among pages of NaN."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.kernels.attention_tiles import AttentionScratch, Tile
from memsvc.device.kernels.block_attention import block_attention
from memsvc.device.kernels.prefill_attention import PrefillPlan, prefill_attention
from tests.support.paged_context import Heads, dense_attention, dense_block_attention, paged_context

E4M3 = torch.float8_e4m3fn
SMALL = Tile(16, 4, 2, programs=2)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
DTYPES = list(TOLERANCE)


def check_block(heads, lengths, device, *, block_size=3, dtype=torch.float32, tile=SMALL, starts=None, **options):
    """Attend once and compare."""
    paged = paged_context(heads, lengths, starts=starts, dtype=dtype, device=device, kv_dtype=E4M3)
    assert paged.k_pages.dtype == paged.v_pages.dtype == E4M3
    width = heads.num_heads + 2 * heads.num_kv_heads
    rows = torch.randn(len(lengths), block_size, width, heads.dim, device=device).to(dtype)
    block = rows.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=2)
    scratch = AttentionScratch(len(lengths), block_size, heads.num_heads, heads.dim, 6, device)
    scratch.tile = tile
    for room in (scratch.partial, scratch.tops, scratch.totals):
        room.fill_(torch.nan)
    options = {"causal": False, "window": 0} | options
    got = block_attention(*block, paged.k_pages, paged.v_pages, paged.context, scratch=scratch, **options)
    want = dense_block_attention(paged, block, scale=heads.dim**-0.5, **options)
    assert got.dtype == dtype
    assert got.isfinite().all()
    assert (got.double() - want).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (False, 9), (True, 40)])
def test_blocks_see_the_numbers_of_the_pages(device, dtype, causal, window):
    torch.manual_seed(0)
    check_block(Heads(num_kv_heads=1), [1, 37, 0, 41], device, dtype=dtype, causal=causal, window=window)


@pytest.mark.parametrize(
    ("heads", "block_size"),
    [(Heads(group=1, num_kv_heads=3, page=1), 1), (Heads(group=4, num_kv_heads=1, dim=24, page=5), 9)],
)
def test_heads_and_pages_of_any_size(device, heads, block_size):
    torch.manual_seed(1)
    check_block(heads, [19, 50], device, block_size=block_size, causal=True)


def test_sinks_and_starts_are_as_over_other_pages(device):
    torch.manual_seed(2)
    heads = Heads(group=3, num_kv_heads=1)
    sink = torch.randn(heads.num_heads, device=device) * 2 + 3
    check_block(heads, [45, 0, 33], device, sink=sink, starts=[30, 0, 33])


@dataclass(frozen=True)
class Span:
    table_row: int
    start: int
    num: int
    first: int


def check_prefill(heads, shapes, device, *, window=0, dtype=torch.float32, tile=SMALL):
    """shapes: (start, num) of each request."""
    lengths = [start + num for start, num in shapes]
    paged = paged_context(heads, lengths, dtype=dtype, device=device, kv_dtype=E4M3)
    spans, first = [], 0
    for row, (start, num) in zip(paged.context.members.tolist(), shapes, strict=True):
        spans.append(Span(row, start, num, first))
        first += num
    q = torch.randn(first, heads.num_heads, heads.dim, device=device).to(dtype)
    plan = PrefillPlan.of(spans, heads.group, device)
    pages = paged.k_pages, paged.v_pages
    got = prefill_attention(q, pages, paged.context.page_table, plan, window=window, tile=tile)
    assert (got.dtype, got.isfinite().all()) == (dtype, True)
    for span, k, v in zip(spans, paged.keys, paged.values, strict=True):
        end = span.start + span.num
        behind = torch.arange(span.start, end)[:, None] - torch.arange(end)
        seen = (behind >= 0) & ((behind < window) if window else (behind >= 0))
        rows = slice(span.first, span.first + span.num)
        want = dense_attention(q[rows], k, v, seen.to(device), heads.dim**-0.5)
        assert (got[rows].double() - want).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 7])
def test_prompts_see_the_numbers_of_the_pages(device, dtype, window):
    torch.manual_seed(3)
    check_prefill(Heads(num_kv_heads=1, group=3), [(0, 1), (17, 50), (33, 1)], device, window=window, dtype=dtype)


def test_other_pairs_of_dtypes_are_refused(device):
    heads = Heads()
    scratch = AttentionScratch(1, 2, 4, 16, 3, device)
    plan = PrefillPlan.of([Span(1, 0, 2, 0)], heads.group, device)
    q = torch.randn(1, 2, 4, 16, device=device)
    k = v = torch.randn(1, 2, 2, 16, device=device)
    paged = paged_context(heads, [4], dtype=torch.float32, device=device, kv_dtype=E4M3)
    half = paged_context(heads, [4], dtype=torch.float16, device=device)
    options = {"causal": True, "window": 0, "scratch": scratch}
    for pages in ((half.k_pages, half.v_pages), (paged.k_pages, paged.v_pages.view(torch.uint8))):
        with pytest.raises(ValueError, match="one dtype"):
            block_attention(q, k, v, *pages, paged.context, **options)
        with pytest.raises(ValueError, match="one dtype"):
            prefill_attention(q[0], pages, paged.context.page_table, plan)
    with pytest.raises(ValueError, match="one dtype"):
        block_attention(q, k.half(), v.half(), paged.k_pages, paged.v_pages, paged.context, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_contexts_with_the_tables_tiles(dtype):
    torch.manual_seed(4)
    for dim, page in ((128, 16), (64, 128), (256, 16)):
        heads = Heads(num_kv_heads=4, group=4, dim=dim, page=page)
        check_block(heads, [32_768, 1, 0, 700], "cuda", block_size=9, dtype=dtype, tile=None, causal=True)
        check_block(heads, [1300] * 33, "cuda", block_size=9, dtype=dtype, tile=None, window=700)
        check_prefill(replace(heads, num_kv_heads=2), [(0, 2048), (30_000, 700)], "cuda", dtype=dtype, tile=None)


def test_without_a_gpu_all_kernels_compile_for_hopper_and_clamp_before_they_convert(tmp_path):
    # A process of its own: in this one kernels may be interpreted.
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compile_fp8_kv"]
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert told.returncode == 0, told.stderr[-3000:]
    assert told.stdout.split() == ["_attend_chunks", "_attend_spans", "_rotate", "_write_block", "_write_context"]
