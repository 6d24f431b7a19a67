"""Admin: what an operator or a dashboard asks."""

from memsvc.core.errors import RequestError
from memsvc.core.pins import Pins, longest
from memsvc.core.radix import TOKEN_BYTES, checkpoints_up
from memsvc.core.reqs import Running
from memsvc.core.stats import snapshot
from memsvc.core.store import PageStore
from memsvc.wire.admin import Evict, Evicted, Match, Matched, Pin, Pinned, SnapshotReport

FLUSH_CHUNK = 256
"""Pages evicted at a time when many have to go."""


class Admin:
    """The operator's verbs that act on pages."""

    def __init__(self, store: PageStore, running: Running, pins: Pins) -> None:
        self._store = store
        self._running = running
        self._pins = pins

    def match(self, msg: Match) -> Matched:
        """How much is cached, by any model, without touching the eviction order."""
        _check_tokens(msg.tokens)
        _, node, num_pages = longest(self._store, msg.tokens, msg.salt)
        page_size = self._store.kinds.page_size
        if node is None or not num_pages:
            return Matched(prefix_len=0, draft_valid_from=0)
        columns = self._store.tree_pages(node, num_pages)
        first = [self._store.window_start(kind, columns, num_pages) for kind in self._store.kinds.aux]
        valid_from = max(first, default=num_pages)
        state = next(checkpoints_up(node, num_pages), None)
        return Matched(
            prefix_len=num_pages * page_size,
            draft_valid_from=valid_from * page_size,
            state_len=state.at * page_size if state is not None else 0,
        )

    def pin(self, msg: Pin) -> Pinned:
        """Keep what is cached of these tokens."""
        _check_tokens(msg.tokens)
        root, node, num_pages = longest(self._store, msg.tokens, msg.salt)
        if root is None or node is None or not num_pages:
            raise RequestError(f"pin {msg.name!r}: nothing of these {len(msg.tokens) // TOKEN_BYTES} tokens is cached")
        return self._pins.pin(msg, node, num_pages)

    def flush(self) -> None:
        """Evict all that can go."""
        while self._store.evict(FLUSH_CHUNK):
            pass

    def evict(self, msg: Evict) -> Evicted:
        """Evict until num_pages pages of one kind are free that were not, or nothing is left to evict."""
        try:
            kind = self._store.kinds.index(msg.kind)
        except ValueError as error:
            raise RequestError(str(error)) from error
        before = list(self._store.num_evicted)
        while (left := msg.num_pages - (self._store.num_evicted[kind] - before[kind])) > 0:
            if not self._store.evict(min(left, FLUSH_CHUNK)):
                break
        return Evicted(num_pages=[now - old for now, old in zip(self._store.num_evicted, before, strict=True)])

    def snapshot(self) -> SnapshotReport:
        """Open requests, tree size and pins."""
        page_size = self._store.kinds.page_size
        pins = {pin.name: pin.num_pages * page_size for pin in self._pins.held.values()}
        return snapshot(self._store, self._running, pins)


def _check_tokens(tokens: bytes) -> None:
    if len(tokens) % TOKEN_BYTES:
        raise RequestError(f"{len(tokens)} bytes of tokens; they are {TOKEN_BYTES} bytes each")
