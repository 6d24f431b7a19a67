"""Page tables on a device: the rows that changed on the host go there in one copy, on the stream of the kernels."""

import torch

from memsvc.device.page_table import PageTables

_BUFFERS = 3
"""Copies that may be under way: one for each step in flight, and one that is being filled."""


class TableMirror:
    """int32 [max_reqs + 1, max_pages] on a device, equal to a PageTables after each push.

    Kernels and captured graphs hold `table`, which stays where it is. A push is ordered with them by the
    stream that is current; the host waits for nothing unless three pushes are under way.
    """

    def __init__(self, tables: PageTables, device: torch.device | str) -> None:
        """device: a CUDA device; on the CPU the same copies are made at once."""
        self._tables = tables
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self.table = torch.zeros(tables.table.shape, dtype=torch.int32, device=self._device)
        rows, width = tables.table.shape
        self._staged = [
            # A row's number stands before its pages, so that one copy brings both.
            torch.zeros((rows, 1 + width), dtype=torch.int32, pin_memory=self._is_cuda)
            for _ in range(_BUFFERS)
        ]
        self._arrived: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._next = 0

    def push(self) -> int:
        """Bring every changed row to the device; how many there were."""
        rows = self._tables.take_changed()
        if not rows:
            return 0
        arrived = self._arrived[self._next]
        if arrived is not None:
            arrived.synchronize()
        staged = self._staged[self._next][: len(rows)]
        staged[:, 0] = torch.tensor(rows, dtype=torch.int32)
        staged[:, 1:] = self._tables.table[rows]
        moved = staged.to(self._device, non_blocking=True)
        self.table.index_copy_(0, moved[:, 0].long(), moved[:, 1:])
        if self._is_cuda:
            self._arrived[self._next] = torch.cuda.Event()
            self._arrived[self._next].record()  # type: ignore[union-attr]
        self._next = (self._next + 1) % _BUFFERS
        return len(rows)
