"""Pins: cached prefixes that an operator wants kept, within a budget of frames."""

from dataclasses import dataclass

from memsvc.core.errors import RequestError
from memsvc.core.ledger import Ledger
from memsvc.core.page_states import PINNED, TREE
from memsvc.core.radix import Checkpoint, Node, Root, checkpoints_up
from memsvc.core.store import PageStore
from memsvc.wire.admin import Pin, Pinned

MAX_TTL_S = 365 * 86400.0
"""Longest life of a pin."""


@dataclass(kw_only=True, slots=True, eq=False)
class Held:
    """One pin: the path to node, draft pages of the window at its end, and the last checkpoint before it."""

    name: str
    node: Node
    num_pages: int
    until: float
    pages: list[tuple[int, int]]
    """(kind, page) of all that it holds."""
    aux_low: int
    checkpoint: Checkpoint | None


class Pins:
    """A pin locks like a request does, and marks its pages as pinned."""

    def __init__(self, store: PageStore, ledger: Ledger, budget_frames: int) -> None:
        self._store = store
        self._ledger = ledger
        self._budget = budget_frames
        self.held: dict[str, Held] = {}
        self._counts: dict[tuple[int, int], int] = {}

    def pin(self, msg: Pin, node: Node, num_pages: int) -> Pinned:
        """Hold num_pages on the path to node. Raises RequestError past the budget or if the elder would suffer.

        A pin of the same name is replaced once the new one stands.
        """
        # Written so that NaN is refused too.
        if not 0 < msg.ttl_s <= MAX_TTL_S:
            raise RequestError(f"pin {msg.name!r}: ttl_s is {msg.ttl_s}, must be positive and at most {MAX_TTL_S:g}")
        if num_pages and num_pages < node.end:
            node = self._store.split(node, num_pages - node.start)
        held = self._lock(msg, node, num_pages)
        refusal = self._refusal(msg)
        if refusal:
            self._unlock(held)
            raise RequestError(refusal)
        if msg.name in self.held:
            self.unpin(msg.name)
        self.held[msg.name] = held
        left = self._budget - self.frames_touched()
        return Pinned(pinned_len=num_pages * self._store.kinds.page_size, budget_left=left)

    def _refusal(self, msg: Pin) -> str:
        touched = self.frames_touched()
        if touched > self._budget:
            return f"pin {msg.name!r}: all pins together would touch {touched} frames, the budget is {self._budget}"
        if not self._store.fits(self._ledger.elder_ahead()):
            return f"pin {msg.name!r}: the oldest request could not finish beside it; try again later"
        return ""

    def frames_touched(self) -> int:
        """Frames with a pinned page."""
        per_frame = self._store.kinds.pages_per_frame
        return len({page // per_frame[kind] for kind, page in self._counts})

    def _lock(self, msg: Pin, node: Node, num_pages: int) -> Held:
        store, kinds = self._store, self._store.kinds
        columns = store.tree_pages(node, num_pages)
        store.lock_path(node)
        pages = [(kinds.primary, page) for page in columns[0]]
        low = num_pages
        for column, kind in enumerate(kinds.token[1:], start=1):
            first = max(0, num_pages - kinds.windows[kind] // kinds.page_size) if kinds.windows[kind] else 0
            aux = [page for page in columns[column][first:] if page]
            store.lock_pages(kind, aux)
            pages += [(kind, page) for page in aux]
            low = min(low, first)
        checkpoint = next(checkpoints_up(node, num_pages), None) if kinds.states else None
        if checkpoint is not None:
            store.lock_checkpoint(checkpoint)
            for kind, states in zip(kinds.states, checkpoint.pages, strict=True):
                pages += [(kind, page) for page in states]
        for kind, page in pages:
            self._counts[kind, page] = self._counts.get((kind, page), 0) + 1
            store.pool.set_state(kind, page, PINNED)
        return Held(
            name=msg.name,
            node=node,
            num_pages=num_pages,
            until=store.now + msg.ttl_s,
            pages=pages,
            aux_low=low,
            checkpoint=checkpoint,
        )

    def unpin(self, name: str) -> None:
        """Let go of a pin. Raises RequestError if there is none of that name."""
        if name not in self.held:
            raise RequestError(f"no pin {name!r}; there are {sorted(self.held)}")
        self._unlock(self.held.pop(name))

    def _unlock(self, held: Held) -> None:
        store, aux = self._store, self._store.kinds.aux
        for kind, page in held.pages:
            self._counts[kind, page] -= 1
            if not self._counts[kind, page]:
                del self._counts[kind, page]
                store.pool.set_state(kind, page, TREE)
            if kind in aux:
                store.unlock_pages(kind, [page])
        store.unlock_path(held.node)
        store.note_unlocked(held.node, held.aux_low, held.num_pages)
        if held.checkpoint is not None:
            store.unlock_checkpoint(held.checkpoint)

    def expire(self) -> bool:
        """Let go of pins past their time. Whether there were any."""
        names = [held.name for held in self.held.values() if held.until <= self._store.now]
        for name in names:
            self.unpin(name)
        return bool(names)

    def next_due(self) -> float:
        """When the next pin ends; infinity if there is none."""
        return min((held.until for held in self.held.values()), default=float("inf"))


def longest(store: PageStore, tokens: bytes, salt: str) -> tuple[Root | None, Node | None, int]:
    """The namespace of this salt that has most of tokens cached, the node there, and the number of pages."""
    best: tuple[Root | None, Node | None, int] = (None, None, 0)
    for (_, root_salt), root in store.tree.roots.items():
        if root_salt != salt:
            continue
        node, shared = store.tree.match(root, tokens, len(tokens) // store.tree.page_bytes)
        pages = node.start + shared
        if pages > best[2] or best[1] is None:
            best = (root, node, pages)
    return best
