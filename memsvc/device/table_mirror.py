"""Page tables on a device: the rows that changed on the host go there in one copy, on the stream of the kernels."""

import numpy as np
import torch

from memsvc.device.page_table import PageTables
from memsvc.device.slots import Stage


class TableMirror:
    """int32 [max_reqs + 1, max_pages] on a device, equal to a PageTables after each push.

    Kernels and captured graphs hold `table`, which stays where it is. A push is ordered with them by the
    stream that is current; the host waits for nothing.
    """

    def __init__(self, tables: PageTables, device: torch.device | str) -> None:
        self._tables = tables
        self.table = torch.zeros(tables.table.shape, dtype=torch.int32, device=device)

    def push(self, stage: Stage) -> int:
        """Enqueue every changed row on the current stream; how many there were."""
        rows = self._tables.take_changed()
        if not rows:
            return 0
        # A row's number stands before its pages, so that one copy brings both.
        columns = np.array(rows, dtype=np.int32)[:, None]
        staged = stage(np.concatenate((columns, self._tables.table.numpy()[rows]), axis=1))
        self.table.index_copy_(0, staged[:, 0].long(), staged[:, 1:])
        return len(rows)
