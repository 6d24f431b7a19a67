"""Page ids of the per-request kinds: which state each request reads, which it writes, and its rings."""

from collections.abc import Sequence

import numpy as np

from memsvc.wire.base import PageId


class StateTable:
    """Page ids for each row and linear layer, int32 on the host. Rows are those of the target's PageTables.

    A request reads its state from state_in and writes it to state_out. They differ after a prefix hit, and after
    the state it stands on was frozen; the first write ends that (wrote).
    """

    def __init__(self, *, max_reqs: int, num_layers: int, ring_pages: int = 1) -> None:
        """ring_pages: pages of one layer's ring."""
        self.num_layers = num_layers
        form = (max_reqs + 1, num_layers)
        self.state_in = np.zeros(form, dtype=np.int32)
        self.state_out = np.zeros(form, dtype=np.int32)
        self.ring = np.zeros((*form, ring_pages), dtype=np.int32)

    def open(
        self, row: int, *, state_out: Sequence[PageId], ring: Sequence[PageId], state_in: Sequence[PageId]
    ) -> None:
        """Pages of a new request, one a layer; of rings ring_pages a layer, those of a layer side by side.

        state_in is the frozen state of its hit, or empty without one.
        """
        self._set(self.state_out, row, state_out)
        self._set(self.ring, row, ring)
        self._set(self.state_in, row, state_in or [PageId(0)] * self.num_layers)

    def wrote(self, row: int) -> None:
        """A forward wrote the state: from now on it is read where it was written."""
        self.state_in[row] = self.state_out[row]

    def freeze(self, row: int, state_out: Sequence[PageId]) -> None:
        """The state that the request stands on is never written again; its next one goes to state_out."""
        self._set(self.state_out, row, state_out)

    def is_borrowed(self, row: int) -> bool:
        """The state that the row reads is not its own: another may read it too, and somebody else decides how long."""
        return bool((self.state_in[row] != self.state_out[row]).any())

    def close(self, row: int) -> None:
        """Clear the row."""
        for table in (self.state_in, self.state_out, self.ring):
            table[row] = 0

    def _set(self, table: np.ndarray, row: int, pages: Sequence[PageId]) -> None:
        form = table[row].shape
        if len(pages) != table[row].size or min(pages) < 0:
            raise ValueError(
                f"row {row} needs pages {list(form)} for {self.num_layers} linear layers, got {list(pages)}"
            )
        table[row] = np.reshape(pages, form)
