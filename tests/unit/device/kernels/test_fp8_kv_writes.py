"""Kernels that write e4m3 pages: those hold what torch rounds the reference's K and V to, and a block's own K and V are
what its pages hold. Numbers beside a tie may fall to the other side, as K itself is within two units of the reference."""

import math

import pytest
import torch

from memsvc.device.layers import RMSNorm

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels import context_write as kernels
from memsvc.device.kernels.heads import rotate_heads, rotate_heads_into_pages
from memsvc.device.kernels.places import TokenRows
from tests.support import head_rows as rig
from tests.support.kernels import from_e4m3

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16]
LAYERS, BLOCK = 3, 4


def cut(x: torch.Tensor) -> torch.Tensor:
    """x as e4m3 pages give it back, in its own dtype."""
    return x.float().clamp(-448, 448).to(E4M3).to(x.dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, but for the sign of NaN."""
    got, want = got.float(), want.float()
    numbers = torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9))
    return numbers and torch.equal(got.signbit()[~got.isnan()], want.signbit()[~want.isnan()])


def at(pages: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
    return pages[place[0], place[1]]


def forget(pool, places) -> None:
    """NaN at these places and in page 0."""
    codes = pool.pages.view(torch.uint8)
    codes[0] = 0x7F
    for page, offset in places:
        codes[page, :, :, offset] = 0x7F


def qkv_rows(num: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random, with V far past 448 here and there, below what e4m3 has, NaN, infinite and -0."""
    heads, kv_heads, head_dim = sizes
    qkv = torch.randn(num, (heads + 2 * kv_heads) * head_dim)
    qkv[:, -head_dim:] *= torch.logspace(-5, 4, head_dim)
    qkv[0, -6:] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 460.0, -1e6])
    return qkv.to(device, dtype)


def test_the_interpreter_reads_every_code_as_torch_does():
    codes = torch.arange(256).to(torch.uint8)
    assert same(torch.from_numpy(from_e4m3(codes.numpy())), codes.view(E4M3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "fraction", "value_scale"), [((4, 2, 16), 1.0, 1.0), ((5, 3, 24), 0.5, 0.6)])
@pytest.mark.parametrize("norm", ["plain", None])
def test_a_block_and_its_pages_hold_the_same(device, dtype, sizes, fraction, value_scale, norm):
    torch.manual_seed(8)
    rows = rig.block_rows(device)
    rotary = rig.rotary_of(sizes[2], device, fraction=fraction)
    spec = rig.head_spec(rotary, sizes, dtype, value_scale=value_scale, norm=norm)
    pool = rig.poisoned_pool(2, sizes[1], sizes[2], E4M3, device)
    qkv = qkv_rows(rows.num_rows, sizes, dtype, device)
    if norm is None:
        # Turned, some are past 448.
        qkv[:, sizes[0] * sizes[2] : -sizes[1] * sizes[2]] *= 200
    q, k, v = rotate_heads_into_pages(qkv, rows, spec, (pool.k(1), pool.v(1)))
    plain = rotate_heads(qkv, rows, spec)
    assert torch.equal(q, plain[0])
    for got, want in ((k, plain[1]), (v, plain[2])):
        assert got.dtype == dtype
        assert same(got, cut(want))
        assert not same(got, want)
        assert float(got.nan_to_num(0.0).abs().max()) <= 448
    if norm is None:
        assert float(plain[1].abs().max()) > 464, "the test needs keys past the largest"
    places = rig.places_of(rows)
    for row, place in enumerate(places):
        if place is not None:
            assert same(at(pool.k(1), place), k[row])
            assert same(at(pool.v(1), place), v[row])
    forget(pool, [place for place in places if place is not None])
    assert pool.pages.float().isnan().all()
    assert bool((pool._halves[0].view(torch.uint8) & 0x7F == 0x7F).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_prefill_go_to_the_slots_named(device, dtype):
    torch.manual_seed(9)
    sizes = 4, 2, 16
    spec = rig.head_spec(rig.rotary_of(16, device), sizes, dtype)
    pool = rig.poisoned_pool(2, 2, 16, E4M3, device)
    positions, slots = (torch.tensor(column, device=device) for column in ([3, 4, 5, 90], [27, 8, 9, 119]))
    qkv = qkv_rows(4, sizes, dtype, device)
    rotate_heads_into_pages(qkv, TokenRows(positions=positions, slots=slots), spec, (pool.k(1), pool.v(1)))
    _, k, v = rotate_heads(qkv, positions, spec)
    for row, place in enumerate([(6, 3), (2, 0), (2, 1), (29, 3)]):
        assert same(at(pool.k(1), place), cut(k[row]))
        assert same(at(pool.v(1), place), cut(v[row]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_there_already_are_rounded_on_their_way_to_pages(device, dtype):
    torch.manual_seed(0)
    rows = rig.block_rows(device)
    pool = rig.poisoned_pool(2, 3, 24, E4M3, device)
    wide = (torch.randn(rows.num_rows, 3, 3, 24) * 300).to(device, dtype)
    wide[0, 0, 0, :3] = torch.tensor([math.nan, -0.0, math.inf], dtype=dtype)
    k, v = wide[:, 0], wide[:, 2]
    kernels.write_block_kv(k, v, pool.k(1), pool.v(1), rows)
    places = rig.places_of(rows)
    for row, place in enumerate(places):
        if place is not None:
            assert same(at(pool.k(1), place), cut(k[row]))
            assert same(at(pool.v(1), place), cut(v[row]))
    forget(pool, [place for place in places if place is not None])
    assert pool.pages.float().isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim", "fraction"), [(2, 16, 1.0), (3, 24, 0.5)])
def test_context_of_all_layers_is_the_references_rounded(device, dtype, kv_heads, head_dim, fraction):
    torch.manual_seed(kv_heads * head_dim)
    rotary = rig.rotary_of(head_dim, device, fraction=fraction, yarn=True)
    # Normed keys are about 200 in size, so that some are past 448.
    norm = RMSNorm((torch.randn(LAYERS, 1, head_dim) * 200).to(device, dtype), rig.EPS)
    spec = kernels.ContextSpec(k_norm=norm, rotary=rotary, value_scale=0.6)
    kv = torch.randn(6, LAYERS, 2, kv_heads, head_dim)
    kv[:, :, 1] *= torch.logspace(-4, 4, head_dim)
    kv[0, 0, 1, 0, :3] = torch.tensor([math.nan, -0.0, -math.inf])
    kv = kv.to(device, dtype)
    positions = torch.tensor([0, 1, 2, 9, 77, 1000], device=device)
    slots = torch.tensor([4, 5, 6, 90, 91, 119], device=device)
    pools = [rig.poisoned_pool(LAYERS, kv_heads, head_dim, kept, device) for kept in (E4M3, dtype)]
    for pool in pools:
        kernels.write_context_kv(kv, spec, pool, TokenRows(positions=positions, slots=slots))
    rounded, plain = (
        [pool.pages[slot // rig.PAGE, :, :, slot % rig.PAGE] for slot in slots.tolist()] for pool in pools
    )
    # The plain kernel is compared with the reference in test_context_write.
    assert all(same(got, cut(want)) for got, want in zip(rounded, plain, strict=True))
    assert max(float(want[:, 0].abs().max()) for want in plain) > 464
    v = cut(kv[:, :, 1] * 0.6)
    assert all(same(got[:, 1], v[row]) for row, got in enumerate(rounded))
    forget(pools[0], [(slot // rig.PAGE, slot % rig.PAGE) for slot in slots.tolist()])
    assert pools[0].pages.float().isnan().all()
