"""Where the states of a hybrid target's requests stand on the device, as far as results have been read. No torch.

There a block writes the state if its request's length, as it was before the block, has passed a page edge. So with the
results of a block the host knows where the state stands after it: at the last edge up to where the block began. A
prompt's chunks take it as far as state_reach says.
"""

from collections.abc import Iterable

from memsvc.device.state_table import StateTable
from target_worker.req import Req


class StateBook:
    """Follows in the StateTable, and in each request's RecurrentState, what the device did."""

    def __init__(self, table: StateTable, page_size: int) -> None:
        """table: of the host; its rows are brought to the device when a request opens and when a state is frozen."""
        self._table = table
        self._page_size = page_size

    def reached(self, req: Req, length: int) -> None:
        """The state has come to the last page edge of so many tokens, if it wasn't there."""
        edge = length // self._page_size * self._page_size
        if req.state is not None and edge > req.state.length:
            self._table.wrote(req.row)
            req.state.length = edge

    def behind(self, reqs: Iterable[Req]) -> list[Req]:
        """Those whose state is not at the last page edge of what is computed."""
        return [
            req
            for req in reqs
            if req.state is not None and req.computed_len // self._page_size * self._page_size > req.state.length
        ]
