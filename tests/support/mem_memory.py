"""All slots of the arena, what was written to them, and what was ever published."""

from typing import Any

from tests.support.mem_builders import PAGE_SIZE
from tests.support.mem_states import Frozen

Slot = tuple[int, int, int]
"""kind, page, offset"""


class Memory:
    """All slots of the arena. The kinds share the bytes of a frame, as in the real one."""

    def __init__(self, pages_per_frame: list[int]) -> None:
        self.per_frame = pages_per_frame
        self.slots: dict[Slot, Any] = {}
        self.frame_kind: dict[int, int] = {}
        self.stale: set[tuple[int, int]] = set()
        """Pages that may hold bytes of another kind."""

    def clear(self, kind: int, page: int) -> None:
        """Zero a page; if its frame was another kind's, that kind's bytes are lost."""
        per_frame = self.per_frame[kind]
        frame = page // per_frame
        if self.frame_kind.get(frame) != kind:
            self.slots = {slot: v for slot, v in self.slots.items() if slot[1] // self.per_frame[slot[0]] != frame}
            self.frame_kind[frame] = kind
            self.stale |= {(kind, other) for other in range(frame * per_frame, (frame + 1) * per_frame)}
        self.stale.discard((kind, page))
        for offset in range(PAGE_SIZE):
            self.slots[kind, page, offset] = None

    def write(self, kind: int, page: int, offset: int, value: Any) -> None:
        """Write one slot of a page that this kind owns."""
        frame = page // self.per_frame[kind]
        assert frame, f"kind {kind} page {page} does not exist"
        assert self.frame_kind.get(frame) == kind, f"kind {kind} page {page} is in a frame of another kind"
        assert (kind, page) not in self.stale, f"kind {kind} page {page} holds another kind's bytes"
        self.slots[kind, page, offset] = value

    def read(self, kind: int, page: int, offset: int) -> Any:
        """What is there, None if never written."""
        return self.slots.get((kind, page, offset))


class Published:
    """Which prefixes were ever given to the tree, per namespace: the oracle for hits without eviction."""

    def __init__(self, interval_pages: int = 1) -> None:
        self.frozen = Frozen(interval_pages)
        self.target: set[tuple[str, str, tuple[int, ...]]] = set()
        self.draft: set[tuple[str, str, tuple[int, ...]]] = set()

    def hit(self, model: str, salt: str, tokens: list[int]) -> int:
        """Expected prefix_len."""
        pages = 0
        while (pages + 1) * PAGE_SIZE < len(tokens):
            if (model, salt, tuple(tokens[: (pages + 1) * PAGE_SIZE])) not in self.target:
                break
            pages += 1
        return pages * PAGE_SIZE

    def valid_from(self, model: str, salt: str, tokens: list[int], hit: int, window: int) -> int:
        """Expected draft_valid_from of a hit."""
        low = hit // PAGE_SIZE
        first = max(0, low - -(-window // PAGE_SIZE)) if window else 0
        while low > first and (model, salt, tuple(tokens[: low * PAGE_SIZE])) in self.draft:
            low -= 1
        return low * PAGE_SIZE
