"""Page tables of one kind: for each running request, its page ids in order."""

import numpy as np
import torch

from memsvc.wire.base import PageId, ReqId


class PageTables:
    """int32 [max_reqs + 1, max_pages], kept on the host. Row 0 is the dummy request: all zeros.

    A request holds one row from add to remove. Places without a page hold 0, the dummy page; -1 never appears.
    """

    def __init__(self, *, max_reqs: int, max_pages: int, page_size: int, device: torch.device | str = "cpu") -> None:
        """device: where gather's and slots' results go."""
        self.max_reqs = max_reqs
        self.max_pages = max_pages
        self.page_size = page_size
        self.device = torch.device(device)
        self._table = np.zeros((max_reqs + 1, max_pages), dtype=np.int32)
        self._rows: dict[ReqId, int] = {}
        self._free = list(range(max_reqs, 0, -1))
        self._changed: set[int] = set()

    @property
    def table(self) -> torch.Tensor:
        """The whole table, int32 on the host, sharing memory with it."""
        return torch.from_numpy(self._table)

    def add(self, rid: ReqId) -> int:
        """Give rid an empty row and return it. More than max_reqs requests are the caller's mistake."""
        assert rid not in self._rows, f"rid {rid} already has row {self._rows[rid]}"
        if not self._free:
            raise ValueError(f"all {self.max_reqs} page-table rows are taken, none is left for rid {rid}")
        row = self._free.pop()
        self._rows[rid] = row
        return row

    def remove(self, rid: ReqId) -> None:
        """Take rid's row back and clear it."""
        row = self._rows.pop(rid)
        self._table[row] = 0
        self._changed.add(row)
        self._free.append(row)

    def row(self, rid: ReqId) -> int:
        """The row of rid. KeyError if it has none."""
        return self._rows[rid]

    def __contains__(self, rid: ReqId) -> bool:
        return rid in self._rows

    def set(self, rid: ReqId, idx: int, page: PageId) -> None:
        """Page idx of rid is page."""
        self.set_many([rid], [idx], [page])

    def set_many(self, rids: list[ReqId], idxs: list[int], pages: list[PageId]) -> None:
        """Columns of equal length, as memsvc's replies have them."""
        if not rids:
            return
        assert len(rids) == len(idxs) == len(pages), f"columns of {len(rids)}, {len(idxs)} and {len(pages)} entries"
        if min(idxs) < 0 or max(idxs) >= self.max_pages:
            raise ValueError(f"page index outside [0, {self.max_pages}): {min(idxs)} or {max(idxs)}")
        if min(pages) < 0:
            raise ValueError(f"page id {min(pages)} is negative")
        rows = [self._rows[rid] for rid in rids]
        self._table[rows, idxs] = pages
        self._changed.update(rows)

    def set_row(self, rid: ReqId, pages: list[PageId]) -> None:
        """The first len(pages) pages of rid, at its opening."""
        if len(pages) > self.max_pages:
            raise ValueError(f"rid {rid} has {len(pages)} pages, a row holds {self.max_pages}")
        if pages and min(pages) < 0:
            raise ValueError(f"page id {min(pages)} is negative")
        row = self._rows[rid]
        self._table[row, : len(pages)] = pages
        self._changed.add(row)

    def take_changed(self) -> list[int]:
        """Rows that are not what they were at the last call, ascending."""
        rows = sorted(self._changed)
        self._changed.clear()
        return rows

    def slots(self, row: int, start: int, n: int) -> torch.Tensor:
        """Slots of tokens [start, start + n) of a row: int64 [n] on device."""
        return self.slots_at(np.full(n, row), np.arange(start, start + n))

    def slots_at(self, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Slots of token positions[i] of row rows[i]: int64 [n] on device. The batched form of slots."""
        return torch.from_numpy(self.host_slots_at(rows, positions)).to(self.device)

    def host_slots_at(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """slots_at on the host, for who sends more than that to the device in one copy."""
        idxs = positions // self.page_size
        if len(idxs) and (idxs.min() < 0 or idxs.max() >= self.max_pages):
            raise ValueError(
                f"positions [{positions.min()}, {positions.max()}] outside a row of "
                f"{self.max_pages} pages x {self.page_size} tokens"
            )
        pages = self._table[rows, idxs].astype(np.int64)
        return pages * self.page_size + positions % self.page_size

    def pages(self, rows: list[int], num_pages: int, first: int = 0) -> torch.Tensor:
        """Page ids [first, first + num_pages) of rows: int64 [len(rows), num_pages] on device, past the row's end 0."""
        part = self._table[rows, first : first + num_pages].astype(np.int64)
        if part.shape[1] < num_pages:
            part = np.pad(part, ((0, 0), (0, num_pages - part.shape[1])))
        return torch.from_numpy(part).to(self.device)
