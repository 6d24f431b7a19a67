"""Block attention over pages against dense attention in float64, among pages full of NaN."""

import mmap
import tempfile
from dataclasses import replace

import pytest
import torch

from tests.support.never_waits import never_waits
from tests.support.paged_context import Heads, dense_block_attention, paged_context

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.kernels import block_attention as kernels
from memsvc.device.kernels.attention_tiles import AttentionScratch, Tile, choose_tile, padded_rows
from memsvc.device.kernels.block_attention import block_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
SMALL = Tile(16, 4, 2)


@pytest.fixture
def sparse_arena(device):
    """fp16 elements that nobody touches cost nothing: on the CPU a file without content, on CUDA 9 GB for a moment."""
    num_elements = 35 << 27
    if device == "cuda":
        yield torch.empty(num_elements, dtype=torch.float16, device=device)
        return
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * num_elements)
        with mmap.mmap(file.fileno(), 2 * num_elements) as memory:
            yield torch.frombuffer(memory, dtype=torch.float16)


def random_block(heads, num_places, block_size, dtype, device):
    """q, k, v as views of one projection's rows."""
    width = heads.num_heads + 2 * heads.num_kv_heads
    rows = torch.randn(num_places, block_size, width, heads.dim, device=device).to(dtype)
    return rows.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=2)


def check(heads, lengths, device, *, block_size=3, tile=SMALL, max_splits=6, **options):
    """Attend once and compare; the largest error."""
    dtype = options.pop("dtype", torch.float32)
    growth = options.pop("growth", 0.0)
    paged = paged_context(heads, lengths, starts=options.pop("starts", None), dtype=dtype, device=device, growth=growth)
    block = random_block(heads, len(lengths), block_size, dtype, device)
    scratch = AttentionScratch(len(lengths), block_size, heads.num_heads, heads.dim, max_splits, device)
    scratch.tile = tile
    for room in (scratch.partial, scratch.tops, scratch.totals):
        room.fill_(torch.nan)
    options = {"causal": False, "window": 0} | options
    got = block_attention(*block, paged.k_pages, paged.v_pages, paged.context, scratch=scratch, **options)
    options.setdefault("scale", heads.dim**-0.5)
    want = dense_block_attention(paged, block, **options)
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert got.isfinite().all()
    assert (got.double() - want).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 2, 9, 40])
def test_rows_see_the_window_and_their_block_by_position(device, causal, window):
    torch.manual_seed(0)
    check(Heads(num_kv_heads=1), [1, 37, 0, 41], device, causal=causal, window=window)


@pytest.mark.parametrize(
    ("heads", "block_size"),
    [
        (Heads(group=1, num_kv_heads=3, page=1), 1),
        (Heads(group=3, num_kv_heads=1, dim=64, page=16), 8),
        (Heads(group=4, num_kv_heads=1, dim=24, page=5), 9),
        (Heads(group=7, num_kv_heads=2, dim=16, page=128), 5),
        (Heads(group=8, num_kv_heads=1, dim=8, page=3), 17),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_group_sizes_head_dims_pages_and_row_tiles_of_any_size(device, heads, block_size, causal):
    torch.manual_seed(1)
    lengths = [19, 50] if block_size < 10 else [40]
    check(heads, lengths, device, block_size=block_size, causal=causal, window=12 * causal, max_splits=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_numbers_are_summed_in_thirty_two(device, dtype):
    torch.manual_seed(2)
    check(Heads(dim=32, page=16), [150, 3], device, block_size=4, dtype=dtype, tile=replace(SMALL, block=32))


@pytest.mark.parametrize("num_splits", [1, 2, 5, 40])
def test_any_number_of_chunks_adds_up_to_the_same(device, num_splits, monkeypatch):
    torch.manual_seed(3)
    # 16 rows in all, 4 a request: a program of the merge has one of them, or three and the next the fourth.
    monkeypatch.setattr(kernels, "_MERGE_PROGRAMS", 8 if num_splits == 5 else 2048)
    check(Heads(num_kv_heads=1), [120, 0, 31, 70], device, block_size=2, max_splits=num_splits,
          tile=replace(SMALL, programs=num_splits))  # fmt: skip


def test_one_request_is_cut_as_far_as_its_tiles_go(device):
    torch.manual_seed(4)
    for growth in (0.0, 9.0):
        check(Heads(num_kv_heads=1), [150], device, max_splits=50, tile=replace(SMALL, programs=50), growth=growth)


def test_a_sink_takes_its_weight_once_however_many_chunks_there_are(device):
    torch.manual_seed(5)
    heads = Heads(group=3, num_kv_heads=1)
    sink = torch.randn(heads.num_heads, device=device) * 2 + 3
    for num_splits in (1, 9):
        check(heads, [45, 0], device, sink=sink, max_splits=num_splits, tile=replace(SMALL, programs=num_splits))


def test_positions_before_the_start_are_not_read(device):
    torch.manual_seed(6)
    for window in (0, 20):
        check(Heads(num_kv_heads=1), [60, 33, 18], device, starts=[41, 33, 17], window=window, scale=0.3)


def test_a_start_past_the_length_leaves_the_block_alone(device):
    torch.manual_seed(7)
    paged = paged_context(Heads(), [20], dtype=torch.float32, device=device)
    block = random_block(Heads(), 1, 2, torch.float32, device)
    paged.context.starts.fill_(200)
    scratch = AttentionScratch(1, 2, 4, 16, 3, device)
    got = block_attention(*block, paged.k_pages, paged.v_pages, paged.context, causal=True, window=0, scratch=scratch)
    alone = replace(paged, keys=[paged.keys[0][:0]], values=[paged.values[0][:0]], starts=[0])
    want = dense_block_attention(alone, block, causal=True, window=0, scale=0.25)
    assert (got.double() - want).abs().max() < 1e-5


def test_many_places_share_one_scratch_and_one_long_request_takes_most_chunks(device):
    torch.manual_seed(8)
    heads = Heads(num_kv_heads=1, group=1)
    lengths = [3] * 18 + [260] + [0, 7]
    paged = paged_context(heads, lengths, dtype=torch.float32, device=device)
    block = random_block(heads, len(lengths), 2, torch.float32, device)
    scratch = AttentionScratch(40, 2, 1, 16, 12, device)
    scratch.tile = replace(SMALL, programs=3)
    scratch._num_multiprocessors = 4
    got = block_attention(*block, paged.k_pages, paged.v_pages, paged.context, causal=False, window=0, scratch=scratch)
    want = dense_block_attention(paged, block, causal=False, window=0, scale=0.25)
    assert (got.double() - want).abs().max() < 1e-5
    chunks = scratch.plan[: len(lengths), 1].tolist()
    # 12 splits for 18 * 2 + 18 + 1 + 2 = 57 tiles: 5 tiles a chunk.
    assert chunks == [1] * 18 + [4] + [1, 1]


def test_addresses_above_two_to_the_thirty_one_elements(device, sparse_arena):
    """Page 32 of 2^27 elements lies at 2^32: in 32 bits that is page 0, full of NaN, and so on."""
    torch.manual_seed(9)
    heads = Heads(num_kv_heads=1, page=16)
    pages = sparse_arena.as_strided((35, 2, 16, 1, 16), (1 << 27, 256, 16, 16, 1))
    paged = paged_context(heads, [40], dtype=torch.float16, device=device)
    places = [32, 34, 33]
    pages[:3] = torch.nan
    old = paged.context.page_table[paged.context.members[0], :3].long()
    for place, page in zip(places, old.tolist(), strict=True):
        pages[place, 0], pages[place, 1] = paged.k_pages[page], paged.v_pages[page]
    paged.context.page_table[paged.context.members[0], :3] = torch.tensor(places, dtype=torch.int32, device=device)
    block = random_block(heads, 1, 2, torch.float16, device)
    scratch = AttentionScratch(1, 2, 2, 16, 3, device)
    got = block_attention(*block, pages[:, 0], pages[:, 1], paged.context, causal=True, window=0, scratch=scratch)
    want = dense_block_attention(paged, block, causal=True, window=0, scale=0.25)
    assert (got.double() - want).abs().max() < TOLERANCE[torch.float16]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("heads", "block_size"),
    [
        (Heads(num_kv_heads=8, group=4, dim=128, page=16), 9),
        (Heads(num_kv_heads=4, group=6, dim=256, page=16), 9),
        (Heads(num_kv_heads=3, group=3, dim=64, page=16), 8),
        (Heads(num_kv_heads=2, group=8, dim=128, page=128), 16),
        (Heads(num_kv_heads=1, group=16, dim=128, page=48), 16),
    ],
)
@pytest.mark.parametrize("window", [0, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_contexts_with_the_tables_tiles(heads, block_size, window, dtype):
    torch.manual_seed(10)
    options = {"block_size": block_size, "dtype": dtype, "tile": None, "causal": window == 0, "window": window}
    for lengths in ([32_768, 1, 0, 700], [1300] * 33, [131_072]):
        check(heads, lengths, "cuda", max_splits=132, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_graph_follows_the_lengths_and_never_waits_for_the_host():
    torch.manual_seed(11)
    heads = Heads(num_kv_heads=8, group=4, dim=128, page=16)
    paged = paged_context(heads, [9000, 40, 1300], dtype=torch.bfloat16, device="cuda")
    block = random_block(heads, 3, 9, torch.bfloat16, "cuda")
    scratch = AttentionScratch.for_buckets([4], 9, (32, 8), 128, "cuda")

    def attend():
        return block_attention(
            *block, paged.k_pages, paged.v_pages, paged.context, causal=False, window=0, scratch=scratch
        )

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), never_waits():
        out = attend()
    members = paged.context.members.long()
    for lengths in ([9000, 40, 1300], [0, 0, 0], [17, 33, 1299], [8999, 0, 64]):
        paged.context.lengths[members] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        out.fill_(torch.nan)
        graph.replay()
        cut = replace(
            paged,
            keys=[k[:n] for k, n in zip(paged.keys, lengths, strict=True)],
            values=[v[:n] for v, n in zip(paged.values, lengths, strict=True)],
        )
        want = dense_block_attention(cut, block, causal=False, window=0, scale=128**-0.5)
        assert (out.double() - want).abs().max() < TOLERANCE[torch.bfloat16]


def test_mistakes_are_named(device):
    paged = paged_context(Heads(), [5], dtype=torch.float32, device=device)
    q, k, v = random_block(Heads(), 1, 2, torch.float32, device)
    scratch = AttentionScratch(1, 2, 4, 16, 3, device)
    options = {"causal": True, "window": 0, "scratch": scratch}
    pages = paged.k_pages, paged.v_pages, paged.context
    with pytest.raises(ValueError, match="one dtype"):
        block_attention(q.half(), k.half(), v.half(), *pages, **options)
    with pytest.raises(ValueError, match="does not go with"):
        block_attention(q[:, :, :3], k, v, *pages, **options)
    with pytest.raises(ValueError, match="must be alike"):
        block_attention(q, k, v, paged.k_pages, paged.v_pages[:3], paged.context, **options)
    with pytest.raises(ValueError, match="can't serve 2"):
        block_attention(*(x.expand(2, -1, -1, -1) for x in (q, k, v)), *pages, **options)
    with pytest.raises(ValueError, match=r"of \[8, 16\] can't serve 1 of \(4, 16\)"):
        block_attention(q[:, :1], k[:, :1], v[:, :1], *pages, **options)


def test_rows_of_a_program_and_its_tile_come_from_the_table():
    assert [padded_rows(n) for n in (1, 16, 17, 36, 64, 128, 129)] == [
        (16, 1), (16, 1), (32, 1), (64, 1), (64, 1), (128, 1), (128, 2),
    ]  # fmt: skip
    assert choose_tile(36, 96, torch.bfloat16) is choose_tile(64, 128, torch.float16)
    assert choose_tile(36, 128, torch.float32) is choose_tile(8, 512, torch.float16)


def test_a_scratch_for_buckets_serves_each_of_them_with_full_splits():
    scratch = AttentionScratch.for_buckets([1, 4, 64], 9, (32, 8), 128, "cpu")
    tile = choose_tile(36, 128, torch.bfloat16)
    assert {scratch.splits(n, 8, 100, tile) for n in (1, 4, 64)} == {scratch.splits(1, 8, 100, tile)}
    assert scratch.splits(1, 8, 0, tile) == 1
    assert kernels._padded_places(1) == 1
    assert [kernels._padded_places(n) for n in (2, 16, 17, 64, 65)] == [16, 16, 64, 64, 128]
