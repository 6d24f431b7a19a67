"""What the invariant check finds, each with the page's owner and age."""

from memsvc.core.page_states import STATE_NAMES
from memsvc.core.reqs import Running
from memsvc.core.store import PageStore
from memsvc.wire.admin import Problem
from memsvc.wire.base import PageId

MAX_PROBLEMS = 100


class Faults:
    """Collects problems; beyond a hundred nobody reads on."""

    def __init__(self, store: PageStore, running: Running) -> None:
        self._store = store
        self._running = running
        self.problems: list[Problem] = []
        self.leaked_bytes = 0

    def leak(self, kind: int, num_pages: int) -> None:
        """Pages that no list and no owner has."""
        self.leaked_bytes += num_pages * self._store.kinds.page_bytes[kind]

    def odd(self, what: str, kind: int = 0, page: int = 0) -> None:
        """Something is not as it must be; page 0 if it is about no page."""
        if len(self.problems) >= MAX_PROBLEMS:
            return
        pool = self._store.pool
        self.problems.append(
            Problem(
                kind=self._store.kinds.names[kind],
                page=PageId(page),
                state=STATE_NAMES[pool.state[kind][page]] if page else "",
                owner=self._owner(pool.owner[kind][page]) if page else "nobody",
                age_s=self._store.now - pool.stamp[kind][page] if page else 0.0,
                what=what,
            )
        )

    def _owner(self, uid: int) -> str:
        req = self._running.get(uid)
        if req is not None:
            return f"rid {req.rid} of {req.engine.name}"
        return f"closed request (uid {uid})" if uid else "nobody"
