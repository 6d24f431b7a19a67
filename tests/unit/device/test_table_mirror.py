"""Page tables on a device equal the host's after each push, and a push brings no more than what changed."""

import pytest
import torch

from memsvc.device.page_table import PageTables
from memsvc.device.table_mirror import TableMirror
from memsvc.wire.base import PageId, ReqId

RIDS = [ReqId(rid) for rid in (7, 8, 9)]


def push(mirror: TableMirror) -> int:
    return mirror.push(lambda values: torch.from_numpy(values.copy()).to(mirror.table.device))


@pytest.fixture(params=["cpu", "cuda"])
def pair(request: pytest.FixtureRequest) -> tuple[PageTables, TableMirror]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tables = PageTables(max_reqs=4, max_pages=5, page_size=16)
    return tables, TableMirror(tables, request.param)


def pages(*ids: int) -> list[PageId]:
    return [PageId(page) for page in ids]


def test_a_push_brings_openings_growth_and_removals(pair: tuple[PageTables, TableMirror]) -> None:
    tables, mirror = pair
    for rid in RIDS:
        tables.add(rid)
    tables.set_row(RIDS[0], pages(3, 4))
    tables.set_many(RIDS[1:], [0, 4], pages(5, 6))
    assert push(mirror) == 3
    assert torch.equal(mirror.table.cpu(), tables.table)
    assert mirror.table[tables.row(RIDS[2]), 4] == 6
    tables.remove(RIDS[0])
    assert push(mirror) == 1
    assert torch.equal(mirror.table.cpu(), tables.table)


def test_a_push_without_changes_copies_nothing(pair: tuple[PageTables, TableMirror]) -> None:
    tables, mirror = pair
    tables.add(RIDS[0])
    assert push(mirror) == 0


def test_many_pushes_without_a_look_between_arrive_in_order(pair: tuple[PageTables, TableMirror]) -> None:
    tables, mirror = pair
    tables.add(RIDS[0])
    seen = []
    for page in range(1, 20):
        tables.set(RIDS[0], 2, PageId(page))
        push(mirror)
        seen.append(mirror.table[tables.row(RIDS[0]), 2].clone())
    assert [int(value) for value in seen] == list(range(1, 20))
    assert torch.equal(mirror.table.cpu(), tables.table)


def test_the_table_stays_where_it_is(pair: tuple[PageTables, TableMirror]) -> None:
    tables, mirror = pair
    before = mirror.table.data_ptr()
    tables.add(RIDS[0])
    tables.set(RIDS[0], 0, PageId(1))
    push(mirror)
    assert mirror.table.data_ptr() == before
