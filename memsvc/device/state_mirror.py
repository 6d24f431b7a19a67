"""Tables of states and rings on a device: what the host decides goes there, what forwards move on is moved on there."""

import numpy as np
import torch

from memsvc.device.kernels.delta_memory import DeltaTables
from memsvc.device.slots import Stage
from memsvc.device.state_table import StateTable


class StateMirror:
    """DeltaTables with a row for each row of a StateTable.

    A push brings the whole row of a request that was opened, and of one whose state was frozen state_out alone:
    its state_in may be further there than on the host, and its state_len is known there only. As in TableMirror,
    kernels and captured graphs hold the tables, and a push is ordered with them by the stream that is current.
    """

    def __init__(self, table: StateTable, device: torch.device | str) -> None:
        self._table = table
        ring = table.ring.shape
        self.tables = DeltaTables(
            state_in=torch.zeros(ring[:2], dtype=torch.int32, device=device),
            state_out=torch.zeros(ring[:2], dtype=torch.int32, device=device),
            ring=torch.zeros(ring, dtype=torch.int32, device=device),
            state_len=torch.zeros(ring[:1], dtype=torch.int32, device=device),
        )

    def push(self, stage: Stage) -> int:
        """Enqueue what changed on the current stream; how many rows that were."""
        opened, frozen = self._table.take_changed()
        tables, host = self.tables, self._table
        if opened:
            ring = host.ring.reshape(len(host.ring), -1)
            rows, parts = self._stage(opened, [host.state_in, host.state_out, ring], stage)
            tables.state_in.index_copy_(0, rows, parts[0])
            tables.state_out.index_copy_(0, rows, parts[1])
            tables.ring.flatten(1).index_copy_(0, rows, parts[2])
        if frozen:
            rows, parts = self._stage(frozen, [host.state_out], stage)
            tables.state_out.index_copy_(0, rows, parts[0])
        return len(opened) + len(frozen)

    def _stage(
        self, rows: list[int], sources: list[np.ndarray], stage: Stage
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Rows of sources on the device, in one copy: a row's number stands before its pages."""
        columns = [np.array(rows, dtype=np.int32)[:, None], *(source[rows] for source in sources)]
        staged = stage(np.concatenate(columns, axis=1))
        numbers, *parts = staged.split([column.shape[1] for column in columns], dim=1)
        return numbers[:, 0].long(), tuple(parts)
