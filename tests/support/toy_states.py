"""The linear layers of the toy target: a state is the tuple of tokens before it, a ring holds tokens.

So a state that was frozen at the wrong length, written after it was frozen, handed on too early or
evicted while it was still read shows as another text.
"""

from memsvc.device.state_table import StateTable
from memsvc.wire.mem import KindSpec
from target_worker.req import Req
from tests.support.toy_watch import PoolWatch

NUM_LAYERS = 2
STATE_PAGE_BYTES = 1024
RING_PAGE_BYTES = 512


def toy_kinds() -> list[KindSpec]:
    """State and ring of the toy target."""
    return [
        KindSpec("state", STATE_PAGE_BYTES, 0, NUM_LAYERS, is_state=True),
        KindSpec("ring", RING_PAGE_BYTES, 0, NUM_LAYERS),
    ]


class ToyStates:
    """What Recurrence does in a forward, in plain dicts."""

    def __init__(self, table: StateTable, page_size: int, block_size: int, watch: PoolWatch) -> None:
        self._watch = watch
        self._table = table
        self._page_size = page_size
        self._ring_rows = page_size + 2 * block_size
        self.states: dict[int, list[int]] = {}
        self._rings: dict[tuple[int, int], int] = {}
        self.num_reads = 0

    def run(self, req: Req, rows: list[int], num_certain: int) -> None:
        """Check what the request reads, then write what its rows make certain."""
        state = req.state
        assert state is not None
        start = req.computed_len
        write_len = max(state.length, (start + num_certain) // self._page_size * self._page_size)
        text = req.tokens[:start] + rows
        for layer in range(NUM_LAYERS):
            self._read(req, layer, start)
            out, ring = int(self._table.state_out[req.row, layer]), int(self._table.ring[req.row, layer, 0])
            assert out > 0
            assert ring > 0
            if write_len > state.length:
                self.states[out] = text[:write_len]
            for position in range(max(start, write_len), len(text)):
                self._rings[ring, position % self._ring_rows] = text[position]
        if write_len > state.length:
            self._table.wrote(req.row)
            state.length = write_len

    def _read(self, req: Req, layer: int, start: int) -> None:
        state = req.state
        assert state is not None
        page = int(self._table.state_in[req.row, layer])
        if state.length:
            self._watch.read_state(page)
        found = self.states.get(page) if state.length else []
        assert found == req.tokens[: state.length], f"rid {req.rid} reads another state at {state.length}: {found}"
        ring = int(self._table.ring[req.row, layer, 0])
        replayed = [self._rings.get((ring, p % self._ring_rows), -1) for p in range(state.length, start)]
        assert replayed == req.tokens[state.length : start], f"rid {req.rid} replays other rows"
        self.num_reads += state.length > 0
