"""What toy workers do to pages, held against what the memory manager knows of them at that moment."""

from memsvc.core.manager import MemoryManager
from memsvc.core.page_states import FREE, PRIVATE
from memsvc.wire.base import PageId


class PoolWatch:
    """Fails where bytes are touched that are not, or no more, for this worker to touch."""

    def __init__(self, manager: MemoryManager) -> None:
        self._names = [kind.name for kind in manager.layout.kinds]
        self._kinds = manager.layout.kinds
        self._pool = manager._store.pool

    def read_state(self, page: int) -> None:
        """A state is private, or part of a checkpoint that is locked."""
        kind = self._names.index("state")
        held = self._pool.state[kind][page] == PRIVATE or self._pool.refs[kind][page] > 0
        assert held, f"state page {page} is read, and nobody holds it"

    def write(self, name: str, page: int) -> None:
        """A page that is written is not free, and of that kind still."""
        kind = self._names.index(name)
        frame = page // self._kinds[kind].pages_per_frame
        assert self._pool.frame_kind[frame] == kind + 1, f"{name} page {page} is written in another kind's frame"
        assert self._pool.state[kind][page] != FREE, f"{name} page {page} is written late: it is free"

    def read(self, name: str, page: int) -> None:
        """A page that is read for a request that runs is of that kind still, and not free."""
        kind = self._names.index(name)
        frame = page // self._kinds[kind].pages_per_frame
        assert self._pool.frame_kind[frame] == kind + 1, f"{name} page {page} is read in another kind's frame"
        assert self._pool.state[kind][page] != FREE, f"{name} page {page} is read late: it is free"

    def clear(self, name: str, pages: list[PageId]) -> None:
        """Pages that are zeroed are of that kind still, and not free."""
        kind = self._names.index(name)
        for page in pages:
            frame = page // self._kinds[kind].pages_per_frame
            assert self._pool.frame_kind[frame] == kind + 1, f"{name} page {page} is zeroed in another kind's frame"
            assert self._pool.state[kind][page] != FREE, f"{name} page {page} is zeroed late: it is free"
