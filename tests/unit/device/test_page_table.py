"""Rows, pages and slots of requests."""

import numpy as np
import pytest

from memsvc.device.page_table import PageTables
from memsvc.wire.base import PageId, ReqId


def tables(max_reqs: int = 3) -> PageTables:
    return PageTables(max_reqs=max_reqs, max_pages=5, page_size=4)


def rids(*values: int) -> list[ReqId]:
    return [ReqId(value) for value in values]


def pages(*values: int) -> list[PageId]:
    return [PageId(value) for value in values]


def test_rows_are_unique_never_zero_and_come_back() -> None:
    table = tables()
    rows = {table.add(rid) for rid in rids(10, 11, 12)}
    assert rows == {1, 2, 3}
    with pytest.raises(ValueError, match=r"all 3 page-table rows.*rid 13"):
        table.add(ReqId(13))
    freed = table.row(ReqId(11))
    table.remove(ReqId(11))
    assert ReqId(11) not in table
    assert table.add(ReqId(13)) == freed


def test_a_row_is_clean_when_it_is_handed_out_again() -> None:
    table = tables(1)
    row = table.add(ReqId(1))
    table.set_row(ReqId(1), pages(7, 8, 9))
    table.remove(ReqId(1))
    assert table.add(ReqId(2)) == row
    assert (table.table == 0).all()


def test_slots_follow_the_pages_across_their_edges() -> None:
    table = tables()
    row = table.add(ReqId(1))
    table.set_many(rids(1, 1), [1, 0], pages(20, 6))
    assert table.slots(row, 2, 4).tolist() == [6 * 4 + 2, 6 * 4 + 3, 20 * 4, 20 * 4 + 1]
    assert table.slots(0, 0, 6).tolist() == [0, 1, 2, 3, 0, 1]
    assert table.slots_at(np.array([row, 0, row]), np.array([7, 5, 0])).tolist() == [83, 1, 24]
    assert table.slots(row, 20, 0).tolist() == []


def test_pages_are_padded_with_the_dummy_page() -> None:
    table = tables()
    row = table.add(ReqId(1))
    table.set_row(ReqId(1), pages(6, 7))
    table.set(ReqId(1), 4, PageId(9))
    assert table.pages([row, 0], 7).tolist() == [[6, 7, 0, 0, 9, 0, 0], [0] * 7]
    assert table.pages([row], 2, first=3).tolist() == [[0, 9]]


def test_indices_and_pages_out_of_range_are_refused_with_numbers() -> None:
    table = tables()
    row = table.add(ReqId(1))
    with pytest.raises(ValueError, match=r"outside \[0, 5\): 5"):
        table.set(ReqId(1), 5, PageId(3))
    with pytest.raises(ValueError, match="page id -1 is negative"):
        table.set(ReqId(1), 0, PageId(-1))
    with pytest.raises(ValueError, match="page id -1 is negative"):
        table.set_row(ReqId(1), pages(3, -1))
    with pytest.raises(ValueError, match="6 pages, a row holds 5"):
        table.set_row(ReqId(1), pages(1, 2, 3, 4, 5, 6))
    with pytest.raises(ValueError, match=r"positions \[18, 20\] outside a row of 5 pages x 4 tokens"):
        table.slots(row, 18, 3)
    assert (table.table == 0).all()
