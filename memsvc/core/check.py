"""The invariant check: walk all owners, then all pages, and compare with states, counters and lists."""

from collections import Counter
from collections.abc import Iterator

from memsvc.core.frames import FREE, LIMBO, PINNED, PRIVATE, QUARANTINE, STATE_NAMES, TREE
from memsvc.core.limbo import Quarantine
from memsvc.core.pins import Pins
from memsvc.core.radix import Node
from memsvc.core.reqs import Req, Running
from memsvc.core.sessions import Sessions
from memsvc.core.store import PageStore
from memsvc.wire.admin import CheckReport, Problem
from memsvc.wire.base import PageId

NOBODY = 255
"""Claim of a page that no owner has named."""
MAX_PROBLEMS = 100


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
        self._claims = [bytearray([NOBODY]) * len(states) for states in self._pool.state]
        self._locked = [bytearray(len(states)) for states in self._pool.state]
        self._node_refs: Counter[Node] = Counter()
        self._page_refs: Counter[tuple[int, int]] = Counter()
        self._problems: list[Problem] = []
        self._num_pages = 0
        self._leaked_bytes = 0

    def run(self) -> CheckReport:
        """The whole walk at once."""
        for _ in self.walk():
            pass
        return self.report()

    def report(self) -> CheckReport:
        """What a finished walk found."""
        return CheckReport(problems=self._problems, num_pages_checked=self._num_pages, leaked_bytes=self._leaked_bytes)

    def walk(self) -> Iterator[None]:
        """All checks, in small steps."""
        yield from self._claim_reqs()
        self._claim_pins()
        self._claim_returning()
        yield from self._claim_tree()
        yield from self._check_frames()
        self._check_lists()
        yield from self._check_queue()
        self._check_totals()

    # --- owners ---

    def _claim_reqs(self) -> Iterator[None]:
        for req in self._running:
            self._lock_path(req.node)
            for kind, table in enumerate(req.tables):
                for index, page in enumerate(table):
                    if page:
                        self._claim_req_page(req, kind, index, page)
            pages = self._store.tree_pages(req.node, req.num_published)[0]
            if pages != req.tables[req.primary][: req.num_published]:
                self._odd(0, 0, f"rid {req.rid}: its table and the path to its node have different pages")
            if req.engine.reqs.get(req.rid) is not req or req.node.end != req.num_published:
                self._odd(0, 0, f"rid {req.rid}: {req.num_published} pages published, its node ends at {req.node.end}")
            yield

    def _claim_req_page(self, req: Req, kind: int, index: int, page: int) -> None:
        state = self._pool.state[kind][page]
        if state == PRIVATE:
            self._claim(kind, page, PRIVATE)
            if self._pool.owner[kind][page] != req.uid:
                self._odd(kind, page, f"is private to uid {self._pool.owner[kind][page]} but in rid {req.rid}'s table")
        elif state not in (TREE, PINNED):
            self._odd(kind, page, f"is {STATE_NAMES[state]} but at index {index} of rid {req.rid}'s table")
        elif kind != self._kinds.primary:
            self._page_refs[kind, page] += 1
        elif index >= req.num_published:
            self._odd(kind, page, f"is in the tree but rid {req.rid} has published only {req.num_published} pages")

    def _claim_pins(self) -> None:
        for pin in self._pins.held.values():
            self._lock_path(pin.node)
            for kind, page in pin.pages:
                if self._pool.state[kind][page] != PINNED:
                    self._odd(kind, page, f"belongs to pin {pin.name!r} but is not pinned")
                if kind != self._kinds.primary:
                    self._page_refs[kind, page] += 1

    def _claim_returning(self) -> None:
        for client in self._sessions.clients.values():
            for _, kind, page in client.limbo:
                self._claim(kind, page, LIMBO)
        for ward in self._quarantine.wards:
            for kind, page in ward.pages:
                self._claim(kind, page, QUARANTINE)

    def _claim_tree(self) -> Iterator[None]:
        num_nodes = num_pages = 0
        num_aux: Counter[Node] = Counter()
        for node in self._store.tree.nodes():
            num_nodes += 1
            num_pages += node.num_pages
            self._check_node(node)
            for column, kind in enumerate(self._kinds.token):
                for page in node.columns[column]:
                    if page:
                        self._claim_node_page(node, kind, page)
                        num_aux[node.root] += column > 0
            yield
        tree = self._store.tree
        if (num_nodes, num_pages) != (tree.num_nodes, tree.num_pages):
            self._odd(0, 0, f"tree counts {tree.num_nodes} nodes, {tree.num_pages} pages; has {num_nodes}, {num_pages}")
        for root in tree.roots.values():
            if root.num_aux != num_aux[root]:
                self._odd(0, 0, f"namespace {root.salt!r} counts {root.num_aux} draft pages, has {num_aux[root]}")

    def _check_node(self, node: Node) -> None:
        lens = {len(column) for column in node.columns} | {len(node.key) // self._store.tree.page_bytes}
        parent = node.parent
        if len(lens) != 1 or parent is None or parent.end != node.start or not node.num_pages:
            self._odd(0, 0, f"node at page {node.start} has columns of {lens} pages")
        if node.lock_ref != self._node_refs[node]:
            self._odd(0, 0, f"node at page {node.start} counts {node.lock_ref} locks, {self._node_refs[node]} hold it")

    def _claim_node_page(self, node: Node, kind: int, page: int) -> None:
        pinned = self._pool.state[kind][page] == PINNED
        self._claim(kind, page, PINNED if pinned else TREE)
        refs = node.lock_ref
        if kind != self._kinds.primary:
            refs = self._page_refs[kind, page]
            if refs != self._pool.refs[kind][page]:
                self._odd(kind, page, f"counts {self._pool.refs[kind][page]} locks, {refs} hold it")
        self._locked[kind][page] = refs > 0

    def _lock_path(self, node: Node) -> None:
        while node.parent is not None:
            self._node_refs[node] += 1
            node = node.parent

    def _claim(self, kind: int, page: int, state: int) -> None:
        claims = self._claims[kind]
        if claims[page] != NOBODY:
            self._odd(kind, page, f"has two owners: {STATE_NAMES[claims[page]]} and {STATE_NAMES[state]}")
        claims[page] = state

    # --- pages and frames ---

    def _check_frames(self) -> Iterator[None]:
        pool = self._pool
        self._spare = [0] * self._kinds.num_kinds
        self._counts = [[0] * len(STATE_NAMES) for _ in self._kinds.names]
        self._num_loose = 0
        for frame in range(pool.first_frame, pool.num_frames):
            if pool.frame_kind[frame]:
                self._check_frame(frame, pool.frame_kind[frame] - 1)
            if frame % 64 == 0:
                yield

    def _check_frame(self, frame: int, kind: int) -> None:
        pool, per_frame = self._pool, self._kinds.pages_per_frame[kind]
        num_free = num_blocked = 0
        for page in range(frame * per_frame, (frame + 1) * per_frame):
            state = pool.state[kind][page]
            self._counts[kind][state] += 1
            self._check_page(kind, page, state)
            num_free += state == FREE
            num_blocked += state in (PRIVATE, LIMBO, QUARANTINE) or self._locked[kind][page]
        self._num_pages += per_frame
        if (num_free, num_blocked) != (pool.num_free[frame], pool.num_blocked[frame]):
            counted = (pool.num_free[frame], pool.num_blocked[frame])
            self._odd(
                kind, frame * per_frame, f"frame counts {counted} free and blocked pages, has {num_free}, {num_blocked}"
            )
        if num_blocked:
            self._spare[kind] += per_frame - num_blocked
        else:
            self._num_loose += 1
        listed = self._free_list(frame, kind)
        if listed != num_free:
            self._odd(kind, frame * per_frame, f"frame lists {listed} free pages, has {num_free}")
            self._leaked_bytes += max(0, num_free - listed) * self._kinds.page_bytes[kind]

    def _check_page(self, kind: int, page: int, state: int) -> None:
        claim = self._claims[kind][page]
        if state == FREE and claim != NOBODY:
            self._odd(kind, page, f"is free but has an owner: {STATE_NAMES[claim]}")
        elif state != FREE and claim == NOBODY:
            self._odd(kind, page, f"is {STATE_NAMES[state]} and nobody has it")
            self._leaked_bytes += self._kinds.page_bytes[kind]
        elif state not in (FREE, claim):
            self._odd(kind, page, f"is {STATE_NAMES[state]} but its owner is {STATE_NAMES[claim]}")

    def _free_list(self, frame: int, kind: int) -> int:
        pool, per_frame = self._pool, self._kinds.pages_per_frame[kind]
        listed = per_frame - pool.num_handed[frame]
        page = pool.first_free[frame]
        while page and listed <= per_frame:
            listed += 1
            page = pool.next_free[kind][page]
        return listed

    # --- lists, queue, totals ---

    def _check_lists(self) -> None:
        pool = self._pool
        for name, holes in (("locked", pool.locked_holes), ("loose", pool.loose_holes)):
            for kind, per_frame in enumerate(self._kinds.pages_per_frame):
                for num_free in range(1, per_frame):
                    for frame in holes.frames(kind, num_free):
                        is_locked = pool.num_blocked[frame] > 0
                        if pool.num_free[frame] != num_free or is_locked != (name == "locked"):
                            self._odd(
                                kind, frame * per_frame, f"frame is in the list of {name} ones with {num_free} free"
                            )
        partial = sum(
            1 for frame in range(pool.first_frame, pool.num_frames) if pool.frame_kind[frame] and pool.num_free[frame]
        )
        listed = sum(
            len(holes.frames(kind, num_free))
            for holes in (pool.locked_holes, pool.loose_holes)
            for kind, per_frame in enumerate(self._kinds.pages_per_frame)
            for num_free in range(1, per_frame)
        )
        if partial != listed:
            self._odd(0, 0, f"{partial} frames have free pages, {listed} are in a list")

    def _check_queue(self) -> Iterator[None]:
        """Everything that counts as evictable must be reachable by eviction."""
        ranges: dict[Node, list[tuple[int, int, float]]] = {}
        tails: set[Node] = set()
        for entry in self._store.queue.entries():
            if entry.low < 0:
                tails.add(entry.node)
            else:
                ranges.setdefault(entry.node, []).append((entry.low, entry.high, entry.time))
        for node in self._store.tree.nodes():
            if not node.lock_ref and not node.children and node not in tails:
                self._odd(0, 0, f"unlocked end of a path at page {node.end} is not queued for eviction")
            if node.lock_ref:
                self._check_reachable(node, ranges.get(node, []))
            yield

    def _check_reachable(self, node: Node, ranges: list[tuple[int, int, float]]) -> None:
        for column in range(1, len(node.columns)):
            kind = self._kinds.token[column]
            for index, page in enumerate(node.columns[column], start=node.start):
                if not page or self._locked[kind][page]:
                    continue
                stamp = self._pool.stamp[kind][page]
                if not any(low <= index < high and stamp <= time for low, high, time in ranges):
                    self._odd(kind, page, f"draft page {index} of a locked path is unlocked but not queued")

    def _check_totals(self) -> None:
        pool = self._pool
        cut = sum(1 for kind in pool.frame_kind[pool.first_frame :] if kind)
        if cut + len(pool.empty) + pool.first_frame != pool.num_frames or sum(pool.num_cut) != cut:
            self._odd(
                0, 0, f"{cut} cut, {len(pool.empty)} empty and {pool.first_frame} reserved of {pool.num_frames} frames"
            )
        found = (self._spare, self._num_loose, self._counts)
        counted = (pool.spare, pool.num_loose, pool.counts)
        if found != counted:
            self._odd(0, 0, f"spare, loose and states are counted as {counted}, found {found}")

    def _odd(self, kind: int, page: int, what: str) -> None:
        if len(self._problems) >= MAX_PROBLEMS:
            return
        state, age = "", 0.0
        owner = "nobody"
        if page:
            state = STATE_NAMES[self._pool.state[kind][page]]
            age = self._store.now - self._pool.stamp[kind][page]
            uid = self._pool.owner[kind][page]
            req = self._running.get(uid)
            owner = f"rid {req.rid} of {req.engine.name}" if req else f"closed request (uid {uid})" if uid else "nobody"
        self._problems.append(
            Problem(kind=self._kinds.names[kind], page=PageId(page), state=state, owner=owner, age_s=age, what=what)
        )
