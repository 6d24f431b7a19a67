"""Page tables by slot: the host's copy, which a Plan changes, and the one on the device that kernels read."""

from collections.abc import Set as AbstractSet

import numpy as np
import torch

from memsvc.device.page_table import PageTables
from memsvc.device.slots import Stage
from memsvc.device.table_mirror import TableMirror
from memsvc.wire.base import ReqId
from memsvc.wire.spec import Plan


class SlotTables:
    """Slots 1..num_slots, open or not; slot 0 is the dummy, whose row is all zeros.

    The host's copy is ahead of the device's by what was not pushed, and by what the stream has not come to yet.
    """

    def __init__(self, num_slots: int, max_pages: int, page_size: int, device: torch.device | str) -> None:
        # Rows are named by requests there, and the first one gets row 1: each slot is a request that never leaves.
        self.host = PageTables(max_reqs=num_slots, max_pages=max_pages, page_size=page_size, device=device)
        for slot in range(1, num_slots + 1):
            row = self.host.add(ReqId(slot))
            assert row == slot, f"slot {slot} has row {row}"
        self._rows = self.host.table.numpy()
        self._mirror = TableMirror(self.host, device)
        self._open: set[int] = set()

    @property
    def on_device(self) -> torch.Tensor:
        """int32 [num_slots + 1, max_pages], always the same memory."""
        return self._mirror.table

    @property
    def open_slots(self) -> AbstractSet[int]:
        """Those that a target has opened."""
        return self._open

    def __contains__(self, slot: int) -> bool:
        return slot in self._open

    def __len__(self) -> int:
        return len(self._open)

    def pages(self, slot: int) -> np.ndarray:
        """int32 [max_pages]: the host's row of a slot, shared with it."""
        return self._rows[slot]

    def close_all(self) -> int:
        """Every slot is closed; returns how many were open."""
        num = len(self._open)
        self._open.clear()
        return num

    def update(self, msg: Plan) -> None:
        """Closes, opens and pages of msg, on the host; push brings them to the device."""
        self._open.difference_update(msg.closes)
        for opened in msg.opens:
            self._clear(opened.slot)
            self.host.set_row(ReqId(opened.slot), opened.pages)
            self._open.add(opened.slot)
        self.host.set_many([ReqId(slot) for slot in msg.page_slots], msg.page_idxs, msg.page_ids)

    def _clear(self, slot: int) -> None:
        # Taken and added again at once, a row stays where it was.
        self.host.remove(ReqId(slot))
        self.host.add(ReqId(slot))

    def push(self, stage: Stage) -> None:
        """Enqueue what changed on the current stream."""
        self._mirror.push(stage)


def missing_page(pages: np.ndarray, start: int, end: int, page_size: int) -> int | None:
    """Index of the first page without which tokens [start, end) have no place, None if all are there."""
    first, last = start // page_size, -(-end // page_size)
    if last > len(pages):
        return len(pages)
    gaps = np.flatnonzero(pages[first:last] == 0)
    return first + int(gaps[0]) if len(gaps) else None
