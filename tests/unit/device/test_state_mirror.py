"""Tables of states on a device: the host's rows arrive, and what the device has moved on is left alone."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.state_mirror import StateMirror
from memsvc.device.state_table import StateTable
from memsvc.wire.base import PageId


@pytest.fixture
def pair(device: str) -> tuple[StateTable, StateMirror]:
    table = StateTable(max_reqs=3, num_layers=2, ring_pages=2)
    return table, StateMirror(table, device)


def push(mirror: StateMirror) -> int:
    return mirror.push(lambda values: torch.from_numpy(values.copy()).to(mirror.tables.state_len.device))


def ids(*pages: int) -> list[PageId]:
    return [PageId(page) for page in pages]


def test_a_push_brings_a_new_request(pair: tuple[StateTable, StateMirror]) -> None:
    table, mirror = pair
    table.open(2, state_out=ids(4, 5), ring=ids(6, 7, 12, 13), state_in=ids(8, 9))
    table.open(1, state_out=ids(1, 2), ring=ids(20, 21, 22, 23), state_in=[])
    assert push(mirror) == 2
    for name in ("state_in", "state_out", "ring"):
        assert torch.equal(getattr(mirror.tables, name).cpu(), torch.from_numpy(getattr(table, name))), name
    assert push(mirror) == 0


def test_a_freeze_leaves_what_the_device_has_moved_on(pair: tuple[StateTable, StateMirror]) -> None:
    table, mirror = pair
    table.open(2, state_out=ids(4, 5), ring=ids(6, 7, 12, 13), state_in=ids(8, 9))
    push(mirror)
    held = mirror.tables.state_in.data_ptr()
    # Blocks move it on there, before the host reads that they did.
    mirror.tables.state_in[2] = mirror.tables.state_out[2]
    mirror.tables.state_len[2] = 16
    table.freeze(2, ids(10, 11))
    assert push(mirror) == 1
    assert mirror.tables.state_in[2].tolist() == [4, 5]
    assert mirror.tables.state_out[2].tolist() == [10, 11]
    assert mirror.tables.state_len.tolist() == [0, 0, 16, 0]
    assert mirror.tables.state_in.data_ptr() == held


def test_a_request_that_takes_over_a_row_has_it_whole(pair: tuple[StateTable, StateMirror]) -> None:
    table, mirror = pair
    table.open(2, state_out=ids(4, 5), ring=ids(6, 7, 12, 13), state_in=ids(8, 9))
    push(mirror)
    table.freeze(2, ids(10, 11))
    table.close(2)
    assert push(mirror) == 0, "nobody reads the row of nobody"
    table.open(2, state_out=ids(1, 2), ring=ids(3, 4, 5, 6), state_in=[])
    assert push(mirror) == 1
    assert mirror.tables.state_in[2].tolist() == [0, 0]
    assert mirror.tables.state_out[2].tolist() == [1, 2]
