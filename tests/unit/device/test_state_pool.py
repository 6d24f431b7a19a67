"""Pages of states and rings as views, and the table that says whose they are."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from memsvc.device.page_view import page_view
from memsvc.device.ring_pool import RingPool, RingShape
from memsvc.device.state_pool import StatePool, StateShape
from memsvc.device.state_table import StateTable
from memsvc.wire.base import PageId
from memsvc.wire.mem import KindLayout

STATE = StateShape(num_heads=3, k_dim=4, v_dim=5, conv_rows=3, conv_dim=7, dtype=torch.bfloat16)
RING = RingShape(page_rows=6, num_pages=2, num_heads=3, conv_dim=7, dtype=torch.bfloat16)
NUM_PAGES = 9


def kind_of(shape: StateShape | RingShape, **changes: Any) -> KindLayout:
    fields = {
        "name": "kind",
        "page_bytes": shape.page_bytes,
        "tokens_per_page": 0,
        "pages_per_req": 2,
        "window": 0,
        "pages_per_frame": 1,
        "stride_bytes": 512,
        "num_pages": NUM_PAGES,
    }
    return KindLayout(**fields | changes)


def poisoned() -> torch.Tensor:
    return torch.full((NUM_PAGES * 512,), 0xFF, dtype=torch.uint8)


def written(before: torch.Tensor, after: torch.Tensor) -> set[int]:
    """Offsets at which two arenas differ."""
    return set((before != after).nonzero()[:, 0].tolist())


def test_states_in_bfloat16_are_rounded_where_they_are_kept() -> None:
    shape, arena = replace(STATE, recurrent_dtype=torch.bfloat16), poisoned()
    assert shape.page_bytes == STATE.page_bytes - 3 * 4 * 5 * 2
    pool, recurrent = StatePool(arena, kind_of(shape), shape), torch.randn(2, 3, 4, 5)
    conv = torch.randn(2, 3, 7, dtype=torch.bfloat16)
    pool.write(torch.tensor([5, 2]), recurrent, conv)
    found = pool.read(torch.tensor([2, 0, 5]))
    assert found.dtype == torch.float32
    assert torch.equal(found[[2, 0]], recurrent.bfloat16().float())
    assert not found[1].any()
    assert torch.equal(pool.read_conv(torch.tensor([5, 2])), conv)


def test_bytes_of_a_page_are_those_of_its_parts() -> None:
    assert STATE.page_bytes == 3 * 4 * 5 * 4 + 3 * 7 * 2
    assert RING.page_bytes == 6 * (2 * 3 * 4 + 7 * 2)


def test_states_come_back_and_nothing_else_is_touched() -> None:
    arena = poisoned()
    pool = StatePool(arena, kind_of(STATE), STATE)
    before = arena.clone()
    recurrent = torch.randn(2, 3, 4, 5)
    conv = torch.randn(2, 3, 7, dtype=torch.bfloat16)
    pool.write(torch.tensor([5, 2]), recurrent, conv)
    assert torch.equal(pool.read(torch.tensor([2, 5, 2])), recurrent[[1, 0, 1]])
    assert torch.equal(pool.read_conv(torch.tensor([2, 5, 2])), conv[[1, 0, 1]])
    assert written(before, arena) <= {page * 512 + i for page in (2, 5) for i in range(STATE.page_bytes)}
    assert arena[2 * 512 : 2 * 512 + 240].view(torch.float32).tolist() == recurrent[1].flatten().tolist()


def test_page_zero_reads_as_the_zero_state_whatever_it_holds() -> None:
    pool = StatePool(poisoned(), kind_of(STATE), STATE)
    pages = torch.tensor([0, 3, 0])
    assert pool.read(pages)[[0, 2]].eq(0).all()
    assert pool.read_conv(pages)[[0, 2]].eq(0).all()
    assert pool.read(pages)[1].isnan().all()


def test_ring_rows_stand_in_their_page_at_the_position_modulo_its_rows() -> None:
    assert RING.num_rows == 12
    arena = poisoned()
    pool = RingPool(arena, kind_of(RING), RING)
    pages, positions = torch.tensor([4, 4, 7]), torch.tensor([11, 12, 3])
    raw, gates = torch.randn(3, 7, dtype=torch.bfloat16), torch.randn(3, 2, 3)
    pool.write(pages, positions, raw, gates)
    got_raw, got_gates = pool.read(pages[[2, 0]], positions[[2, 0]])
    assert torch.equal(got_raw, raw[[2, 0]])
    assert torch.equal(got_gates, gates[[2, 0]])
    assert torch.equal(pool.read(pages[:1], torch.tensor([5]))[1], gates[:1])
    assert pool.read(torch.tensor([4, 7]), torch.tensor([4, 5]))[1].isnan().all()
    places = {4: (5, 0), 7: (3,)}
    allowed = {
        page * 512 + first + i
        for page, rows in places.items()
        for row in rows
        for first, size in ((row * 24, 24), (RING.gate_bytes + row * 14, 14))
        for i in range(size)
    }
    assert written(poisoned(), arena) <= allowed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_bytes": 8}, "pages of 8 bytes"),
        ({"tokens_per_page": 16}, "holds 16 tokens a page"),
        ({"stride_bytes": 256}, "page stride of 256"),
        ({"stride_bytes": 515, "num_pages": 2}, "not a multiple of 4 bytes"),
        ({"num_pages": 10}, "10 pages end at byte"),
    ],
)
def test_a_layout_of_other_pages_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StatePool(poisoned(), kind_of(STATE, **changes), STATE)
    ring = RingShape(page_rows=12, num_pages=1, num_heads=3, conv_dim=7, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        RingPool(poisoned(), kind_of(ring, **changes), ring)


def test_views_reach_past_two_to_the_31_elements() -> None:
    num_pages = 2**31 // 128 + 2
    arena = torch.empty(num_pages * 512, dtype=torch.uint8, device="meta")
    view = page_view(arena, kind_of(STATE, num_pages=num_pages), 0, (3, 20), torch.float32)
    assert view[-1].storage_offset() == (num_pages - 1) * 128 > 2**31


def ids(*pages: int) -> list[PageId]:
    return [PageId(page) for page in pages]


def test_a_request_reads_what_it_hit_until_it_has_written_and_again_after_a_freeze() -> None:
    table = StateTable(max_reqs=3, num_layers=2, ring_pages=2)
    table.open(2, state_out=ids(4, 5), ring=ids(6, 7, 12, 13), state_in=ids(8, 9))
    assert (table.state_in[2].tolist(), table.state_out[2].tolist()) == ([8, 9], [4, 5])
    assert table.ring[2].tolist() == [[6, 7], [12, 13]]
    assert table.is_borrowed(2)
    table.wrote(2)
    assert table.state_in[2].tolist() == [4, 5]
    assert not table.is_borrowed(2)
    table.freeze(2, ids(10, 11))
    assert table.is_borrowed(2)
    assert (table.state_in[2].tolist(), table.state_out[2].tolist()) == ([4, 5], [10, 11])
    table.close(2)
    assert not table.state_in.any()
    assert not table.state_out.any()
    assert not table.ring.any()


def test_a_request_without_a_hit_reads_page_zero_and_a_row_takes_a_page_for_every_layer() -> None:
    table = StateTable(max_reqs=1, num_layers=2)
    table.open(1, state_out=ids(4, 5), ring=ids(6, 7), state_in=[])
    assert table.state_in[1].tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"needs pages \[2\] for 2 linear layers, got \[3\]"):
        table.freeze(1, ids(3))
    with pytest.raises(ValueError, match="-1"):
        table.freeze(1, ids(3, -1))


def test_changes_are_told_once_and_say_whether_the_request_is_new() -> None:
    table = StateTable(max_reqs=3, num_layers=1)
    for row in (3, 1):
        table.open(row, state_out=ids(row), ring=ids(5), state_in=[])
    table.freeze(3, ids(6))
    assert table.take_changed() == ([1, 3], [])
    table.wrote(1)
    table.freeze(1, ids(7))
    assert table.take_changed() == ([], [1])
    table.open(2, state_out=ids(8), ring=ids(9), state_in=[])
    table.freeze(3, ids(4))
    table.close(2)
    assert table.take_changed() == ([], [3])
    assert table.take_changed() == ([], [])


def test_places_that_are_known_to_be_empty_read_as_the_zero_state() -> None:
    pool = StatePool(poisoned(), kind_of(STATE), STATE)
    found = pool.read(torch.tensor([0, 3, 4]), torch.tensor([0, 2]))
    assert found[[0, 2]].eq(0).all()
    assert found[1].isnan().all()
