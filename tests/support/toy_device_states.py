"""The linear layers of the toy target on a ToyDevice: what target_worker.cuda.states and prompt_states do there.

As in toy_states a state is the tokens before it and a ring holds tokens, so a state that was frozen at the wrong
length, written after it was frozen, handed on too early or evicted while it was still read shows as another text.
"""

from collections.abc import Callable, Sequence

import numpy as np

from memsvc.device.state_table import StateTable
from tests.support.toy_states import NUM_LAYERS
from tests.support.toy_watch import PoolWatch


class ToyDeviceStates:
    """Everything here but `take` happens when the device comes to it."""

    def __init__(self, table: StateTable, page_size: int, block_size: int, watch: PoolWatch) -> None:
        self._host = table
        self._page_size = page_size
        self._block_size = block_size
        self._ring_rows = page_size + 2 * block_size
        self._watch = watch
        self._in, self._out = table.state_in.copy(), table.state_out.copy()
        self._ring, self._len = table.ring.copy(), np.zeros(len(table.ring), dtype=int)
        self._states: dict[int, list[int]] = {}
        self._rows: dict[tuple[int, int], int] = {}
        self.num_reads = self.num_caught_up = 0

    def take(self) -> Callable[[], None]:
        """What the host pushes."""
        opened, frozen = self._host.take_changed()
        rows = [(row, *(t[row].copy() for t in (self._host.state_in, self._host.state_out, self._host.ring)))
                for row in opened]  # fmt: skip
        outs = [(row, self._host.state_out[row].copy()) for row in frozen]

        def push() -> None:
            for row, state_in, state_out, ring in rows:
                self._in[row], self._out[row], self._ring[row] = state_in, state_out, ring
            for row, state_out in outs:
                self._out[row] = state_out

        return push

    def chunk(self, slot: int, text: Sequence[int], rows: tuple[int, int], reach: int) -> None:
        """Rows [start, end) of a prompt, whose state comes to the last edge up to reach."""
        start, end = rows
        edge = reach // self._page_size * self._page_size
        self._len[slot] = start // self._page_size * self._page_size
        self._read(slot, text, start)
        self._write(slot, text, edge, edge)
        for position in range(max(start, edge), end):
            self._keep(slot, position, text[position])

    def block(self, slot: int, text: Sequence[int], block: Sequence[int]) -> None:
        """A block behind text, whose request is not done."""
        self._read(slot, text, len(text))
        self._write(slot, text, len(text), len(text))
        for position, token in enumerate(block, len(text)):
            self._keep(slot, position, token)

    def catch_up(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Bring states to the last page edge of texts. The row behind each is lost."""
        for slot, text in zip(slots, texts, strict=True):
            assert self._len[slot] <= len(text), f"slot {slot} has come to {self._len[slot]} of {len(text)} tokens"
            self._read(slot, text, len(text))
            self._write(slot, text, len(text), len(text))
            self._keep(slot, len(text), -1)
            self.num_caught_up += 1

    def _read(self, slot: int, text: Sequence[int], end: int) -> None:
        length = int(self._len[slot])
        for layer in range(NUM_LAYERS):
            page, ring = int(self._in[slot, layer]), int(self._ring[slot, layer, 0])
            if length:
                self._watch.read_state(page)
            found = self._states.get(page) if length else []
            assert found == list(text[:length]), f"slot {slot} reads another state at {length}: {found}"
            replayed = [self._rows.get((ring, p % self._ring_rows), -1) for p in range(length, end)]
            assert replayed == list(text[length:end]), f"slot {slot} replays other rows from {length} on"
            self.num_reads += length > 0

    def _write(self, slot: int, text: Sequence[int], end: int, keep_from: int) -> None:
        """The state at the last edge up to `end`; rows [keep_from, end) go to the ring."""
        edge = end // self._page_size * self._page_size
        if edge > self._len[slot]:
            for page in self._out[slot].tolist():
                self._watch.write("state", page)
                self._states[page] = list(text[:edge])
            self._in[slot], self._len[slot] = self._out[slot], edge
        for position in range(keep_from, end):
            self._keep(slot, position, text[position])

    def _keep(self, slot: int, position: int, token: int) -> None:
        for page in self._ring[slot, :, 0].tolist():
            self._watch.write("ring", page)
            self._rows[page, position % self._ring_rows] = token
