"""Views into the arena: places, strides, checks, and arenas past 2^31 elements."""

import mmap
import os
from typing import Any

import pytest
import torch

from memsvc.device.kv_pool import KvPool, KvShape, zero_rows
from memsvc.wire.mem import KindLayout

SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
PAGE = 4
PAGE_BYTES = SHAPE.token_bytes * PAGE
STRIDE = PAGE_BYTES + 96


def kind(**changes: Any) -> KindLayout:
    fields = {
        "name": "draft_kv",
        "page_bytes": PAGE_BYTES,
        "tokens_per_page": PAGE,
        "pages_per_req": 0,
        "window": 0,
        "pages_per_frame": 2,
        "stride_bytes": STRIDE,
        "num_pages": 10,
    }
    return KindLayout(**fields | changes)


def nan_arena(num_bytes: int = 10 * STRIDE) -> torch.Tensor:
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


def test_a_page_lies_at_its_stride_layers_first_then_k_and_v() -> None:
    arena = nan_arena()
    pool = KvPool(arena, kind(), SHAPE)
    pool.write(
        1, torch.tensor([7 * PAGE + 3]), *torch.tensor([2.0, 3.0]).bfloat16()[:, None, None, None].expand(2, 1, 2, 8)
    )
    row = 2 * 8 * 2
    k_at = 7 * STRIDE + (1 * 2 + 0) * PAGE * row + 3 * row
    v_at = 7 * STRIDE + (1 * 2 + 1) * PAGE * row + 3 * row
    assert (arena[k_at : k_at + row].view(torch.bfloat16) == 2).all()
    assert (arena[v_at : v_at + row].view(torch.bfloat16) == 3).all()
    assert (arena == 0xFF).sum() == len(arena) - 2 * row


def test_writes_are_seen_through_the_views_and_by_another_pool_over_the_arena() -> None:
    arena = nan_arena()
    pool, peer = KvPool(arena, kind(), SHAPE), KvPool(arena, kind(), SHAPE)
    k, v = torch.randn(2, 5, 2, 8).bfloat16()
    slots = torch.tensor([8, 9, 30, 31, 17])
    pool.write(2, slots, k, v)
    assert torch.equal(peer.k(2)[slots // PAGE, slots % PAGE], k)
    assert torch.equal(peer.v(2)[slots // PAGE, slots % PAGE], v)
    assert peer.k(1).isnan().all()
    assert pool.k(0).shape == (10, PAGE, 2, 8)
    assert pool.k(0).data_ptr() == arena.data_ptr()


def test_gather_returns_the_pages_in_table_order() -> None:
    pool = KvPool(nan_arena(), kind(), SHAPE)
    for page in range(10):
        pool.k(0)[page] = page
        pool.v(0)[page] = -page
    k, v = pool.gather(0, torch.tensor([[5, 2], [9, 0]], dtype=torch.int32))
    assert k.shape == (2, 2 * PAGE, 2, 8)
    assert k[:, ::PAGE, 0, 0].tolist() == [[5, 2], [9, 0]]
    assert torch.equal(v, -k)
    scratch = torch.empty(2, *k.shape, dtype=k.dtype)
    pool.gather_at(0, pool.places(torch.tensor([[5, 2], [9, 0]])), scratch)
    assert torch.equal(scratch[0], k)
    assert torch.equal(scratch[1], v)


@pytest.mark.parametrize("head_dim", [8, 3])
def test_rows_without_a_token_are_zeroed_and_no_others(head_dim: int) -> None:
    gathered = torch.full((2, 3, 4, 1, head_dim), torch.nan, dtype=torch.bfloat16)
    zero_rows(gathered, torch.tensor([0, 7, 23]))
    rows = gathered.view(24, head_dim)
    assert [row for row in range(24) if (rows[row] == 0).all()] == [0, 7, 23]
    assert rows.isnan().sum() == 21 * head_dim


def test_zero_pages_clears_whole_pages_and_nothing_else() -> None:
    arena = nan_arena()
    KvPool(arena, kind(), SHAPE).zero_pages([3, 9])
    for page in range(10):
        inside = arena[page * STRIDE : page * STRIDE + PAGE_BYTES]
        assert (inside == (0 if page in (3, 9) else 0xFF)).all()
        assert (arena[page * STRIDE + PAGE_BYTES : (page + 1) * STRIDE] == 0xFF).all()
    KvPool(arena, kind(), SHAPE).zero_pages([])


def test_the_last_page_may_end_with_the_arena() -> None:
    KvPool(nan_arena(9 * STRIDE + PAGE_BYTES), kind(), SHAPE)
    with pytest.raises(ValueError, match=f"10 pages end at byte {9 * STRIDE + PAGE_BYTES}"):
        KvPool(nan_arena(9 * STRIDE + PAGE_BYTES - 1), kind(), SHAPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_bytes": PAGE_BYTES - 2}, f"pages of {PAGE_BYTES - 2} bytes.*need {PAGE_BYTES}"),
        ({"tokens_per_page": 8}, f"need {2 * PAGE_BYTES}"),
        ({"tokens_per_page": 0}, "holds no tokens"),
        ({"stride_bytes": PAGE_BYTES - 2}, f"stride of {PAGE_BYTES - 2}"),
        ({"stride_bytes": STRIDE + 1}, "not a multiple of 2"),
        ({"num_pages": 0}, "0 pages"),
    ],
)
def test_a_kind_that_does_not_fit_is_refused_with_numbers(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KvPool(nan_arena(), kind(**changes), SHAPE)


def test_the_arena_must_be_flat_bytes() -> None:
    with pytest.raises(ValueError, match=r"uint8 \[bytes\]"):
        KvPool(torch.zeros(10 * STRIDE // 2, dtype=torch.bfloat16), kind(), SHAPE)


def test_addresses_past_two_to_the_31_elements_are_right() -> None:
    stride = 1 << 20
    num_pages = 4100 * 2  # 8.6 GB of address space, of which a few pages are ever touched
    fd = os.memfd_create("arena")
    os.truncate(fd, stride * num_pages)
    memory = mmap.mmap(fd, stride * num_pages)
    os.close(fd)
    pool = KvPool(torch.frombuffer(memory, dtype=torch.uint8), kind(stride_bytes=stride, num_pages=num_pages), SHAPE)
    last = num_pages - 1
    assert last * stride // 2 > 2**31
    k, v = torch.randn(2, 2, 2, 8).bfloat16()
    pool.write(2, torch.tensor([last * PAGE + 1, 5]), k, v)
    got_k, got_v = pool.gather(2, torch.tensor([[last, 1]], dtype=torch.int32))
    assert torch.equal(got_k[0, [1, PAGE + 1]], k)
    assert torch.equal(got_v[0, [1, PAGE + 1]], v)
    assert (got_k != 0).any(-1).any(-1).sum() == 2
    pool.zero_pages([last])
    assert (pool.k(2)[last] == 0).all()
    assert torch.equal(pool.k(2)[1, 1], k[1])
