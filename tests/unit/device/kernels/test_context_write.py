"""Keys and values into pages. A block's are copied bit for bit; context K is within two units in bfloat16 (a few in
float32) in the last place of the largest element of its head, context V equal."""

import pytest
import torch

from memsvc.device.layers import RMSNorm
from tests.support.rounding import rounds_alike

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels import context_write as kernels
from memsvc.device.kernels.places import BlockRows, TokenRows
from tests.support import head_rows as rig

DTYPES = [torch.float32, torch.bfloat16]
LAYERS, BLOCK = 3, 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 16), (3, 24), (1, 256)])
def test_a_block_is_copied_to_its_pages(device, dtype, kv_heads, head_dim):
    torch.manual_seed(0)
    rows = rig.block_rows(device)
    pool = rig.poisoned_pool(2, kv_heads, head_dim, dtype, device)
    wide = torch.randn(rows.num_rows, 3, kv_heads, head_dim).to(device, dtype)
    k, v = wide[:, 0], wide[:, 2]
    kernels.write_block_kv(k, v, pool.k(1), pool.v(1), rows)
    for row, place in enumerate(rig.places_of(rows)):
        if place is not None:
            assert torch.equal(pool.k(1)[place], k[row])
            assert torch.equal(pool.v(1)[place], v[row])
            pool.k(1)[place] = pool.v(1)[place] = torch.nan
    pool.pages[0] = torch.nan
    assert pool.pages.isnan().all()


class Context:
    """Raw projections of N x B feature rows, and the reference's K and V of them."""

    def __init__(self, device, dtype, kv_heads=2, head_dim=16, fraction=1.0):
        torch.manual_seed(kv_heads * head_dim)
        rotary = rig.rotary_of(head_dim, device, fraction=fraction, yarn=True)
        norm = RMSNorm(torch.randn(LAYERS, 1, head_dim).to(device, dtype), rig.EPS)
        self.pool = rig.poisoned_pool(LAYERS, kv_heads, head_dim, dtype, device)
        self.spec = kernels.ContextSpec(k_norm=norm, rotary=rotary, value_scale=0.6)
        blocks = rig.block_rows(device, BLOCK)
        self.members, self.table = blocks.members, blocks.page_table
        self.starts = rig.ints([0, 1, 9, 3, 7, 2, 17], device)
        self.num_rows = rig.ints([0, 4, 0, 4, 3, 4, 4], device)
        self.kv = torch.randn(len(self.members) * BLOCK, LAYERS, 2, kv_heads, head_dim).to(device, dtype)

    def want(self, row, position):
        """K and V [L, kv_heads, d] of a row."""
        k = self.spec.k_norm(self.kv[row : row + 1, :, 0])
        at = torch.tensor([position], device=k.device)
        turned = self.spec.rotary.rotate(k.flatten(1, 2), self.spec.rotary.tables(at, k.dtype)).view(k.shape)
        return turned[0], (self.kv[row, :, 1] * self.spec.value_scale)

    def written(self):
        """(row, page, offset, position) of each row that is a token and has a place."""
        for place, member in enumerate(self.members.tolist()):
            for step in range(int(self.num_rows[member])):
                position = int(self.starts[member]) + step
                index = position // rig.PAGE
                if index < rig.MAX_PAGES:
                    yield place * BLOCK + step, int(self.table[member, index]), position % rig.PAGE, position

    def check(self):
        """The pool holds the reference's K and V of every token, and no other byte was written, page 0 aside."""
        few = 8 if self.kv.dtype == torch.float32 else 2
        count = 0
        for row, page, offset, position in self.written():
            here = self.pool.pages[page, :, :, offset]
            k, v = self.want(row, position)
            scale = k.float().abs().amax(-1, keepdim=True).expand_as(k)
            assert rounds_alike(here[:, 0], k, ulps=few, scale=scale)
            assert torch.equal(here[:, 1], v)
            here.fill_(torch.nan)
            count += 1
        self.pool.pages[0] = torch.nan
        assert self.pool.pages.isnan().all()
        return count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim", "fraction"), [(2, 16, 1.0), (3, 24, 0.5), (1, 256, 0.25)])
def test_context_of_all_layers_is_the_references_and_other_rows_are_untouched(
    device, dtype, kv_heads, head_dim, fraction
):
    case = Context(device, dtype, kv_heads, head_dim, fraction)
    rows = kernels.ContextRows(
        members=case.members, num_rows=case.num_rows, block_size=BLOCK, page_table=case.table, starts=case.starts
    )
    kernels.write_context_kv(case.kv, case.spec, case.pool, rows)
    assert case.check() == 6


def test_rows_may_be_placed_by_where_they_end(device):
    case = Context(device, torch.bfloat16)
    rows = kernels.ContextRows(
        members=case.members, num_rows=case.num_rows, block_size=BLOCK, page_table=case.table,
        ends=case.starts + case.num_rows,
    )  # fmt: skip
    kernels.write_context_kv(case.kv, case.spec, case.pool, rows)
    assert case.check() == 6


def test_tokens_may_be_placed_one_by_one(device):
    case = Context(device, torch.bfloat16)
    places = list(case.written())
    # In another order than they stand in.
    picked = [places[i] for i in (3, 0, 5, 1, 4, 2)]
    tokens = torch.tensor([row for row, *_ in picked], device=device)
    slots, positions = (
        torch.tensor(column, dtype=torch.int64, device=device)
        for column in ([page * rig.PAGE + at for _, page, at, _ in picked], [position for *_, position in picked])
    )
    rows = TokenRows(positions=positions, slots=slots)
    kernels.write_context_kv(case.kv[tokens].contiguous(), case.spec, case.pool, rows)
    assert case.check() == 6


def test_tokens_without_slots_are_refused(device):
    case = Context(device, torch.bfloat16)
    rows = TokenRows(positions=rig.ints(range(len(case.kv)), device))
    with pytest.raises(ValueError, match="TokenRows has no slots"):
        kernels.write_context_kv(case.kv, case.spec, case.pool, rows)


def test_rows_past_the_count_may_hold_anything(device):
    case = Context(device, torch.bfloat16)
    case.kv[3] = torch.nan
    case.kv[8:12] = torch.inf
    rows = kernels.ContextRows(
        members=case.members, num_rows=case.num_rows, block_size=BLOCK, page_table=case.table, starts=case.starts
    )
    kernels.write_context_kv(case.kv, case.spec, case.pool, rows)
    assert case.check() == 6


def test_without_starts_or_ends_nothing_is_written(device):
    case = Context(device, torch.bfloat16)
    rows = kernels.ContextRows(members=case.members, num_rows=case.num_rows, block_size=BLOCK, page_table=case.table)
    with pytest.raises(ValueError, match="starts or ends"):
        kernels.write_context_kv(case.kv, case.spec, case.pool, rows)


def test_pages_beyond_two_to_the_31_elements_are_reached(device):
    # Memory is touched where pages are written only.
    stride, page = (1 << 30) + 64, 2
    flat = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device)
    k_pages, v_pages = (flat[at:].as_strided((3, 1, 1, 16), (stride, 32, 16, 1)) for at in (0, 32))
    rows = BlockRows(
        members=rig.ints([1], device), lengths=rig.ints([0, 0], device), block_size=1,
        page_table=rig.ints([0, page], device)[:, None],
    )  # fmt: skip
    assert page * stride > 1 << 31
    k, v = (torch.randn(1, 1, 16).to(device, torch.bfloat16) for _ in range(2))
    kernels.write_block_kv(k, v, k_pages, v_pages, rows)
    assert torch.equal(flat[page * stride :][:16], k[0, 0])
    assert torch.equal(flat[page * stride + 32 :][:16], v[0, 0])
