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
        self._opened: set[int] = set()
        self._frozen: set[int] = set()

    def open(
        self, row: int, *, state_out: Sequence[PageId], ring: Sequence[PageId], state_in: Sequence[PageId]
    ) -> None:
        """Pages of a new request, one a layer; of rings ring_pages a layer, those of a layer side by side.

        state_in is the frozen state of its hit, or empty without one.
        """
        self._set(self.state_out, row, state_out)
        self._set(self.ring, row, ring)
        self._set(self.state_in, row, state_in or [PageId(0)] * self.num_layers)
        self._opened.add(row)

    def wrote(self, row: int) -> None:
        """A forward wrote the state: from now on it is read where it was written."""
        self.state_in[row] = self.state_out[row]

    def freeze(self, row: int, state_out: Sequence[PageId]) -> None:
        """The state that the request stands on is never written again; its next one goes to state_out."""
        self._set(self.state_out, row, state_out)
        self._frozen.add(row)

    def is_borrowed(self, row: int) -> bool:
        """The state that the row reads is not its own: another may read it too, and somebody else decides how long."""
        return bool((self.state_in[row] != self.state_out[row]).any())

    def close(self, row: int) -> None:
        """Clear the row."""
        for table in (self.state_in, self.state_out, self.ring):
            table[row] = 0
        self._opened.discard(row)
        self._frozen.discard(row)

    def take_changed(self) -> tuple[list[int], list[int]]:
        """Rows that were opened since the last call, and others of which only state_out is new; both ascending.

        What forwards do to state_in is no change: where they run on a device, it is done there.
        """
        opened, frozen = sorted(self._opened), sorted(self._frozen - self._opened)
        self._opened.clear()
        self._frozen.clear()
        return opened, frozen

    def _set(self, table: np.ndarray, row: int, pages: Sequence[PageId]) -> None:
        form = table[row].shape
        if len(pages) != table[row].size or min(pages) < 0:
            raise ValueError(
                f"row {row} needs pages {list(form)} for {self.num_layers} linear layers, got {list(pages)}"
            )
        table[row] = np.reshape(pages, form)
