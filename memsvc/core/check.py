"""The invariant check: compare what the owners say with states, counters, lists and the eviction queue."""

from collections.abc import Iterator

from memsvc.core.eviction import Entry
from memsvc.core.faults import Faults
from memsvc.core.limbo import Quarantine
from memsvc.core.owners import NOBODY, Owners
from memsvc.core.page_states import FREE, LIMBO, PRIVATE, QUARANTINE, STATE_NAMES
from memsvc.core.pins import Pins
from memsvc.core.radix import Node
from memsvc.core.reqs import Running
from memsvc.core.sessions import Sessions
from memsvc.core.store import PageStore
from memsvc.wire.admin import CheckReport

FRAMES_A_STEP = 64


class Checker:
    """One walk. walk() yields often, so that it can be done in slices while nothing changes."""

    def __init__(
        self, store: PageStore, running: Running, sessions: Sessions, quarantine: Quarantine, pins: Pins
    ) -> None:
        self._store = store
        self._pool = store.pool
        self._kinds = store.kinds
        self._running = running
        self._sessions = sessions
        self._quarantine = quarantine
        self._pins = pins
        self._faults = Faults(store, running)
        self._odd = self._faults.odd
        self._owners = Owners(store, self._faults)
        self._num_pages = 0
        self._spare = [0] * self._kinds.num_kinds
        self._counts = [[0] * len(STATE_NAMES) for _ in self._kinds.names]
        self._num_loose = 0

    def run(self) -> CheckReport:
        """The whole walk at once."""
        for _ in self.walk():
            pass
        return self.report()

    def report(self) -> CheckReport:
        """What a finished walk found."""
        return CheckReport(
            problems=self._faults.problems,
            num_pages_checked=self._num_pages,
            leaked_bytes=self._faults.leaked_bytes,
        )

    def walk(self) -> Iterator[None]:
        """All checks, in small steps."""
        yield from self._owners.ask_reqs(self._running)
        self._owners.ask_pins(self._pins)
        self._owners.ask_returning(self._sessions, self._quarantine)
        yield from self._owners.ask_tree()
        yield from self._check_frames()
        self._check_lists()
        yield from self._check_queue()
        self._check_totals()

    # --- pages and frames ---

    def _check_frames(self) -> Iterator[None]:
        pool = self._pool
        for frame in range(pool.first_frame, pool.num_frames):
            if pool.frame_kind[frame]:
                self._check_frame(frame, pool.frame_kind[frame] - 1)
            if frame % FRAMES_A_STEP == 0:
                yield

    def _check_frame(self, frame: int, kind: int) -> None:
        pool, per_frame = self._pool, self._kinds.pages_per_frame[kind]
        first, num_free, num_blocked = frame * per_frame, 0, 0
        for page in range(first, first + per_frame):
            state = pool.state[kind][page]
            self._counts[kind][state] += 1
            self._check_page(kind, page, state)
            num_free += state == FREE
            num_blocked += state in (PRIVATE, LIMBO, QUARANTINE) or self._owners.locked[kind][page]
        self._num_pages += per_frame
        counted, found = (pool.num_free[frame], pool.num_blocked[frame]), (num_free, num_blocked)
        if counted != found:
            self._odd(f"frame counts {counted} free and blocked pages, has {found}", kind, first)
        if num_blocked:
            self._spare[kind] += per_frame - num_blocked
        else:
            self._num_loose += 1
        listed = self._free_list(frame, kind)
        if listed != num_free:
            self._odd(f"frame lists {listed} free pages, has {num_free}", kind, first)
            self._faults.leak(kind, max(0, num_free - listed))

    def _check_page(self, kind: int, page: int, state: int) -> None:
        claim = self._owners.claims[kind][page]
        if state == FREE and claim != NOBODY:
            self._odd(f"is free but has an owner: {STATE_NAMES[claim]}", kind, page)
        elif state != FREE and claim == NOBODY:
            self._odd(f"is {STATE_NAMES[state]} and nobody has it", kind, page)
            self._faults.leak(kind, 1)
        elif state not in (FREE, claim):
            self._odd(f"is {STATE_NAMES[state]} but its owner is {STATE_NAMES[claim]}", kind, page)

    def _free_list(self, frame: int, kind: int) -> int:
        """Pages that the frame could hand out, going by its list."""
        pool, per_frame = self._pool, self._kinds.pages_per_frame[kind]
        listed = per_frame - pool.num_handed[frame]
        page = pool.first_free[frame]
        while page and listed <= per_frame:
            listed += 1
            page = pool.next_free[kind][page]
        return listed

    def _check_lists(self) -> None:
        """Every frame with free pages is in the one list where it belongs."""
        pool, listed = self._pool, 0
        sides = (("locked", pool.locked_holes), ("loose", pool.loose_holes))
        places = [(kind, n) for kind, per_frame in enumerate(self._kinds.pages_per_frame) for n in range(1, per_frame)]
        for name, holes in sides:
            for kind, num_free in places:
                frames = holes.frames(kind, num_free)
                listed += len(frames)
                self._check_list(name, kind, num_free, frames)
        partial = sum(1 for frame in range(pool.first_frame, pool.num_frames) if pool.num_free[frame])
        if partial != listed:
            self._odd(f"{partial} frames have free pages, {listed} are in a list")

    def _check_list(self, name: str, kind: int, num_free: int, frames: list[int]) -> None:
        for frame in frames:
            side = "locked" if self._pool.num_blocked[frame] else "loose"
            if (self._pool.num_free[frame], side) != (num_free, name):
                first = frame * self._kinds.pages_per_frame[kind]
                self._odd(f"frame is in the list of {name} ones with {num_free} free", kind, first)

    # --- eviction queue and totals ---

    def _check_queue(self) -> Iterator[None]:
        """Everything that counts as evictable must be reachable by eviction."""
        entries = self._store.queue.entries()
        tails = {entry.node for entry in entries if entry.low < 0 and entry.checkpoint is None}
        checkpoints = {entry.checkpoint for entry in entries}
        ranges: dict[Node, list[Entry]] = {}
        for entry in entries:
            if entry.low >= 0:
                ranges.setdefault(entry.node, []).append(entry)
        for node in self._store.tree.nodes():
            if not node.lock_ref and not node.children and node not in tails:
                self._odd(f"unlocked end of a path at page {node.end} is not queued for eviction")
            for checkpoint in node.checkpoints.values():
                if not self._store.is_held(checkpoint) and checkpoint not in checkpoints:
                    self._odd(f"unlocked checkpoint at page {checkpoint.at} is not queued for eviction")
            for column in range(1, len(node.columns) if node.lock_ref else 1):
                self._check_reachable(node, column, ranges.get(node, []))
            yield

    def _check_reachable(self, node: Node, column: int, ranges: list[Entry]) -> None:
        kind = self._kinds.token[column]
        for index, page in enumerate(node.columns[column], start=node.start):
            if not page or self._owners.locked[kind][page]:
                continue
            stamp = self._pool.stamp[kind][page]
            if not any(entry.low <= index < entry.high and stamp <= entry.time for entry in ranges):
                self._odd(f"draft page {index} of a locked path is unlocked but not queued", kind, page)

    def _check_totals(self) -> None:
        pool = self._pool
        cut, empty = sum(1 for kind in pool.frame_kind[pool.first_frame :] if kind), len(pool.empty)
        if cut + empty + pool.first_frame != pool.num_frames or sum(pool.num_cut) != cut:
            self._odd(f"{cut} cut, {empty} empty and {pool.first_frame} reserved of {pool.num_frames} frames")
        found = (self._spare, self._num_loose, self._counts)
        counted = (pool.spare, pool.num_loose, pool.counts)
        if found != counted:
            self._odd(f"spare, loose and states are counted as {counted}, found {found}")
