"""Against the norm and Rotary of layers. bfloat16: equal but for one value in fifty, which is within one unit in the
last place of the largest element of its head (two where a norm comes first); float32: within a few units. What goes
to pages is what is returned, bit for bit."""

import pytest
import torch

from tests.support.rounding import rounds_alike

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels.heads import HeadSpec, rotate_heads, rotate_heads_into_pages
from memsvc.device.kernels.places import BlockRows, TokenRows
from tests.support import head_rows as rig

DTYPES = [torch.float32, torch.bfloat16]
POSITIONS = [0, 77, 250_000]


def agrees(got, want, has_norm=True):
    """q, k or v [n, heads, d] of both."""
    few = 8 if got.dtype == torch.float32 else 2 if has_norm else 1
    scale = want.float().abs().amax(-1, keepdim=True).expand_as(want)
    return rounds_alike(got, want, ulps=few, scale=scale)


SHAPES = [((9, 3, 16), 1.0), ((3, 1, 24), 0.5), ((1, 1, 256), 0.25)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "fraction"), SHAPES)
@pytest.mark.parametrize("norm", ["plain", "zero-centred", None])
def test_heads_are_normed_and_turned_as_the_reference_does_it(device, dtype, sizes, fraction, norm):
    torch.manual_seed(sum(sizes))
    spec = rig.head_spec(rig.rotary_of(sizes[2], device, fraction=fraction), sizes, dtype, norm=norm)
    qkv = torch.randn(len(POSITIONS), (sizes[0] + 2 * sizes[1]) * sizes[2]).to(device, dtype)
    positions = torch.tensor(POSITIONS, device=device)
    for got, want in zip(rotate_heads(qkv, positions, spec), rig.reference(qkv, positions, spec), strict=True):
        assert agrees(got, want, norm is not None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_yarns_factor_and_the_scale_of_v_come_in_where_the_reference_has_them(device, dtype):
    torch.manual_seed(5)
    sizes = 3, 2, 32
    spec = rig.head_spec(rig.rotary_of(32, device, yarn=True), sizes, dtype, norm=None, value_scale=0.7)
    qkv = torch.randn(len(POSITIONS), 7 * 32).to(device, dtype)
    positions = torch.tensor(POSITIONS, dtype=torch.int32, device=device)
    q, k, v = rotate_heads(qkv, positions, spec)
    want = rig.reference(qkv, positions, spec)
    assert spec.rotary.scale != 1.0
    assert agrees(q, want[0], False)
    assert agrees(k, want[1], False)
    assert torch.equal(v, want[2])


def test_rows_may_be_wider_and_each_head_may_have_a_weight_of_its_own(device):
    torch.manual_seed(6)
    sizes = 4, 2, 16
    spec = rig.head_spec(rig.rotary_of(16, device), sizes, torch.bfloat16)
    spec.q_norm.weight = torch.randn(4, 16).to(device, torch.bfloat16)
    spec.k_norm.weight = torch.randn(2, 16).to(device, torch.bfloat16)
    qkv = torch.randn(5, 8 * 16 + 4 * 16).to(device, torch.bfloat16)
    positions = torch.arange(5, device=device)
    for got, want in zip(rotate_heads(qkv, positions, spec), rig.reference(qkv, positions, spec), strict=True):
        assert agrees(got, want)


def test_positions_come_from_lengths_by_slot(device):
    torch.manual_seed(7)
    sizes = 2, 1, 16
    rows = rig.block_rows(device)
    spec = rig.head_spec(rig.rotary_of(16, device), sizes, torch.bfloat16)
    qkv = torch.randn(rows.num_rows, 4 * 16).to(device, torch.bfloat16)
    positions = rig.positions_of(rows)
    for got, want in zip(rotate_heads(qkv, rows, spec), rotate_heads(qkv, positions, spec), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "fraction", "value_scale"), [((4, 2, 16), 1.0, 1.0), ((5, 3, 24), 0.5, 0.6)])
def test_a_block_goes_to_its_pages_and_rows_that_belong_nowhere_to_page_0(device, dtype, sizes, fraction, value_scale):
    torch.manual_seed(8)
    rows = rig.block_rows(device)
    rotary = rig.rotary_of(sizes[2], device, fraction=fraction)
    spec = rig.head_spec(rotary, sizes, dtype, value_scale=value_scale)
    pool = rig.poisoned_pool(2, sizes[1], sizes[2], dtype, device)
    qkv = torch.randn(rows.num_rows, (sizes[0] + 2 * sizes[1]) * sizes[2]).to(device, dtype)
    q, k, v = rotate_heads_into_pages(qkv, rows, spec, (pool.k(1), pool.v(1)))
    for got, want in zip((q, k, v), rotate_heads(qkv, rows, spec), strict=True):
        assert torch.equal(got, want)
    check_pages(pool, rig.places_of(rows), k, v)


def check_pages(pool, places, k, v):
    """Layer 1 holds k and v at these places, page 0 aside, and nothing else was written."""
    for row, place in enumerate(places):
        if place is not None:
            assert torch.equal(pool.k(1)[place], k[row])
            assert torch.equal(pool.v(1)[place], v[row])
            pool.k(1)[place] = pool.v(1)[place] = torch.nan
    pool.pages[0] = torch.nan
    assert pool.pages.isnan().all()
    whole = pool._halves[0]
    storage = torch.tensor([], dtype=whole.dtype, device=whole.device).set_(whole.untyped_storage())
    assert storage.isnan().all()


def test_rows_of_a_prefill_go_to_the_slots_named(device):
    torch.manual_seed(9)
    sizes = 4, 2, 16
    spec = rig.head_spec(rig.rotary_of(16, device), sizes, torch.bfloat16)
    pool = rig.poisoned_pool(2, 2, 16, torch.bfloat16, device)
    positions = torch.tensor([3, 4, 5, 90], device=device)
    slots = torch.tensor([27, 8, 9, 119], device=device)
    qkv = torch.randn(4, 8 * 16).to(device, torch.bfloat16)
    rows = TokenRows(positions=positions, slots=slots)
    _, k, v = rotate_heads_into_pages(qkv, rows, spec, (pool.k(1), pool.v(1)))
    assert torch.equal(k, rotate_heads(qkv, positions, spec)[1])
    check_pages(pool, [(6, 3), (2, 0), (2, 1), (29, 3)], k, v)


def test_rows_without_pages_are_refused(device):
    spec = rig.head_spec(rig.rotary_of(16, device), (1, 1, 16), torch.float32)
    pool = rig.poisoned_pool(1, 1, 16, torch.float32, device)
    qkv, one = torch.zeros(1, 48, device=device), rig.ints([0], device)
    for rows in (TokenRows(positions=one), BlockRows(members=one, lengths=one, block_size=1)):
        with pytest.raises(ValueError, match="go to pages"):
            rotate_heads_into_pages(qkv, rows, spec, (pool.k(0), pool.v(0)))


def test_heads_that_are_too_wide_are_refused_with_their_width(device):
    rotary = rig.rotary_of(258, device)
    spec = HeadSpec(num_heads=1, num_kv_heads=1, head_dim=258, rotary=rotary)
    with pytest.raises(ValueError, match="258"):
        rotate_heads(torch.zeros(1, 3 * 258, device=device), torch.zeros(1, device=device), spec)
