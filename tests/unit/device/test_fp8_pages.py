"""A pool whose pages hold e4m3: what is written, copied and cleared, and on which devices. No GPU is needed."""

import mmap
import os
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memsvc.device.cpu.attention import takes
from memsvc.device.fp8_pages import check_capability, rounded, widen
from memsvc.device.kv_dtype import FP8_CAPABILITY
from memsvc.device.kv_pool import KvPool, KvShape, zero_rows
from memsvc.wire.mem import KindLayout

E4M3 = torch.float8_e4m3fn
SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=16, dtype=E4M3)
PAGE, NUM_PAGES = 4, 10
PAGE_BYTES = 3 * 2 * 2 * 16 * PAGE
STRIDE = PAGE_BYTES + 32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


def make_pool(arena: torch.Tensor | None = None, stride: int = STRIDE, num_pages: int = NUM_PAGES) -> KvPool:
    arena = torch.full((num_pages * stride,), 0xFF, dtype=torch.uint8) if arena is None else arena
    return KvPool(arena, KindLayout("kv", PAGE_BYTES, PAGE, 0, 0, 2, stride, num_pages), SHAPE)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Codes of e4m3; NaN has no sign."""
    codes = x.view(torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)


def by_hand(x: float) -> float:
    """The nearest e4m3 by looking at all of them, the even code of two."""
    numbers = torch.arange(127).to(torch.uint8).view(E4M3).double()
    away = (numbers - abs(x)).abs()
    near = (away == away.min()).nonzero()[:, 0].tolist()
    return float(numbers[min(near, key=lambda code: code % 2)]) * (-1 if x < 0 else 1)


def test_numbers_are_rounded_to_the_nearest_and_cut_off_at_the_largest() -> None:
    torch.manual_seed(0)
    numbers = torch.arange(127).to(torch.uint8).view(E4M3).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat(
        [ties, -ties, torch.randn(300) * torch.logspace(-4, 3, 300), torch.tensor([448.1, -463.9, 464.0, 1e9])]
    )
    assert rounded(x).double().tolist() == [by_hand(value) for value in x.tolist()]
    odd = torch.tensor([NAN, float("inf"), -float("inf"), 0.0, -0.0])
    assert rounded(odd).view(torch.uint8).tolist() == [0x7F, 0x7E, 0xFE, 0, 0x80]


class _SmallOnly(TorchFunctionMode):
    """Conversions to e4m3 are of nothing past 448: some versions of torch make NaN of that, others cut it off."""

    num_conversions = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and args[1] == E4M3:
            _SmallOnly.num_conversions += 1
            assert float(args[0].double().abs().nan_to_num(0.0).max()) <= 448
        return func(*args, **kwargs or {})


def test_nothing_past_the_largest_is_left_to_torch() -> None:
    with _SmallOnly():
        make_pool().write(0, torch.tensor([5]), *torch.tensor([500.0, NAN])[:, None, None, None].expand(2, 1, 2, 16))
    assert _SmallOnly.num_conversions == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_widened_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).view(E4M3).view(4, 64)
    out = torch.full((4, 64), 77.0, dtype=dtype)
    widen(codes, out)
    want = codes.double()
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.double().nan_to_num(0.0), want.nan_to_num(0.0))
    assert torch.equal(out.signbit()[~out.isnan()], want.signbit()[~want.isnan()])
    assert torch.equal(bits(rounded(out)), bits(codes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_where_they_are_written_and_nowhere_else(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    pool = make_pool()
    slots = torch.tensor([8, 9, 30, 31, 17])
    k, v = (torch.randn(2, 5, 3, 16) * 300).to(dtype)[:, :, 1:]  # heads of a wider matrix
    k[0, 0, :6] = torch.tensor([NAN, float("inf"), -1e4, -0.0, 448.0, 460.0], dtype=dtype)
    pool.write(1, slots, k, v)
    for pages, rows in ((pool.k(1), k), (pool.v(1), v)):
        found = bits(pages)[slots // PAGE, slots % PAGE]
        assert torch.equal(found, bits(rows.float().clamp(-448, 448).to(E4M3)))
    assert bits(pool.k(1))[2, 0, 0, :6].tolist() == [0x7F, 0x7E, 0xFE, 0x80, 0x7E, 0x7E]
    num_nans = int(pool.pages.float().isnan().sum())
    assert num_nans == pool.pages.numel() - 2 * 5 * 2 * 16 + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_pages_are_bytes_or_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    pool = make_pool()
    k, v = torch.randn(2, 3 * PAGE, 2, 16)
    slots = torch.cat([torch.arange(PAGE) + page * PAGE for page in (5, 2, 9)])
    pool.write(0, slots, k, v)
    table = torch.tensor([[5, 2], [9, 0]])
    codes_k, codes_v = pool.gather(0, table)
    assert codes_k.dtype == E4M3
    want = torch.stack((rounded(k), rounded(v))).to(dtype).view(2, 3, PAGE, 2, 16)
    wide = torch.empty((2, 2, 2 * PAGE, 2, 16), dtype=dtype)
    pool.gather_wide(0, pool.places(table), wide)
    for found in (torch.stack((codes_k, codes_v)).to(dtype), wide):
        pages = found.view(2, 4, PAGE, 2, 16)
        assert torch.equal(pages[:, :3], want)
        assert pages[:, 3].isnan().all()
    rows = pool.rows_at(0, pool.split(slots), dtype)
    assert torch.equal(torch.stack(rows), want.flatten(1, 2))


def test_a_gather_in_the_pages_dtype_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = KvShape(num_layers=1, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    page_bytes = shape.token_bytes * PAGE
    kind = KindLayout("kv", page_bytes, PAGE, 0, 0, 1, page_bytes, 3)
    pool = KvPool(torch.zeros(3 * page_bytes, dtype=torch.uint8), kind, shape)
    out = torch.empty((2, 1, PAGE, 2, 8), dtype=torch.bfloat16)
    given = []
    monkeypatch.setattr(pool, "gather_at", lambda layer, places, out: given.append(out))
    pool.gather_wide(0, pool.places(torch.tensor([[1]])), out)
    assert given[0] is out


def test_pages_are_cleared_whole_and_rows_of_a_gather_too() -> None:
    pool = make_pool()
    pool.zero_pages([3, 9])
    for page in range(NUM_PAGES):
        assert (pool.pages[page].view(torch.uint8) == (0 if page in (3, 9) else 0xFF)).all()
    for head_dim in (16, 3):
        gathered = torch.full((2, 3, 4, 1, head_dim), NAN).to(E4M3)
        zero_rows(gathered, torch.tensor([0, 7, 23]))
        zeros = (gathered.float() == 0).view(24, head_dim).all(1)
        assert zeros.nonzero()[:, 0].tolist() == [0, 7, 23]


def test_addresses_past_two_to_the_32_are_right() -> None:
    stride, num_pages = 1 << 20, 4100
    fd = os.memfd_create("arena")
    os.truncate(fd, stride * num_pages)
    memory = mmap.mmap(fd, stride * num_pages)
    os.close(fd)
    pool = make_pool(torch.frombuffer(memory, dtype=torch.uint8), stride, num_pages)
    last = num_pages - 1
    assert last * stride > 1 << 32
    k, v = torch.randn(2, 2, 2, 16)
    slots = torch.tensor([last * PAGE + 1, 5])
    pool.write(2, slots, k, v)
    got_k, got_v = pool.rows_at(2, pool.split(slots), torch.float32)
    assert torch.equal(got_k, rounded(k).float())
    assert torch.equal(got_v, rounded(v).float())
    pool.zero_pages([last])
    assert not pool.k(2)[last].float().any()
    assert torch.equal(pool.k(2)[1, 1].float(), rounded(k)[1].float())


def test_the_compiled_attention_takes_no_pages_in_8_bits() -> None:
    assert not takes(make_pool())


def test_a_device_without_e4m3_is_refused_with_flag_and_both_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:1")
    for found in ((8, 0), (8, 6)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda asked, found=found: found)
        with pytest.raises(
            ValueError, match=rf"--kv-cache-dtype fp8_e4m3 needs compute capability 8.9, cuda:1 has 8\.{found[1]}"
        ):
            check_capability("--kv-cache-dtype", E4M3, device)
        check_capability("--kv-cache-dtype", torch.bfloat16, device)
        check_capability("--kv-cache-dtype", E4M3, torch.device("cpu"))
    for found in (FP8_CAPABILITY, (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda asked, found=found: found)
        check_capability("--kv-cache-dtype", E4M3, device)
