"""First half of the invariant check: ask every owner what it holds."""

from collections import Counter
from collections.abc import Iterator

from memsvc.core.faults import Faults
from memsvc.core.limbo import Quarantine
from memsvc.core.page_states import LIMBO, PINNED, PRIVATE, QUARANTINE, STATE_NAMES, TREE
from memsvc.core.pins import Pins
from memsvc.core.radix import Checkpoint, Node
from memsvc.core.reqs import Req, Running
from memsvc.core.sessions import Sessions
from memsvc.core.store import PageStore

NOBODY = len(STATE_NAMES)
"""Claim of a page that no owner has named."""


class Owners:
    """Claims by page, and the locks that there must be."""

    def __init__(self, store: PageStore, faults: Faults) -> None:
        self._store = store
        self._pool = store.pool
        self._kinds = store.kinds
        self._odd = faults.odd
        self.claims = [bytearray([NOBODY]) * len(states) for states in self._pool.state]
        """The state that a page must have, by kind and page."""
        self.locked = [bytearray(len(states)) for states in self._pool.state]
        """1 for pages of the tree that someone holds."""
        self._node_refs: Counter[Node] = Counter()
        self._page_refs: Counter[tuple[int, int]] = Counter()
        self._checkpoint_refs: Counter[Checkpoint] = Counter()

    def ask_reqs(self, running: Running) -> Iterator[None]:
        """Every open request: its private pages, and its locks."""
        for req in running:
            self._lock_path(req.node)
            self._check_path(req)
            if req.state_in is not None:
                self._checkpoint_refs[req.state_in] += 1
            for kind, table in enumerate(req.tables):
                self._ask_table(req, kind, table)
            yield

    def _check_path(self, req: Req) -> None:
        if req.engine.reqs.get(req.rid) is not req or req.node.end != req.num_published:
            self._odd(f"rid {req.rid}: {req.num_published} pages published, its node ends at {req.node.end}")
        pages = self._store.tree_pages(req.node, req.num_published)[0]
        if pages != req.tables[req.primary][: req.num_published]:
            self._odd(f"rid {req.rid}: its table and the path to its node have different pages")
        if req.missing and req.rid not in req.engine.incomplete:
            self._odd(f"rid {req.rid}: misses draft pages, but its engine does not know")

    def _ask_table(self, req: Req, kind: int, table: list[int]) -> None:
        for index, page in enumerate(table):
            state = self._pool.state[kind][page] if page else TREE
            if state == PRIVATE:
                self.claim(kind, page, PRIVATE)
                if self._pool.owner[kind][page] != req.uid:
                    owner = self._pool.owner[kind][page]
                    self._odd(f"is private to uid {owner} but in rid {req.rid}'s table", kind, page)
            elif state not in (TREE, PINNED):
                self._odd(f"is {STATE_NAMES[state]} but at index {index} of rid {req.rid}'s table", kind, page)
            elif page and kind != self._kinds.primary:
                self._page_refs[kind, page] += 1
            elif page and index >= req.num_published:
                self._odd(f"is in the tree but rid {req.rid} published only {req.num_published} pages", kind, page)

    def ask_pins(self, pins: Pins) -> None:
        """Every pin: the locks that it holds."""
        for pin in pins.held.values():
            self._lock_path(pin.node)
            for kind, page in pin.pages:
                if self._pool.state[kind][page] != PINNED:
                    self._odd(f"belongs to pin {pin.name!r} but is not pinned", kind, page)
                if kind in self._kinds.aux:
                    self._page_refs[kind, page] += 1
            if pin.checkpoint is not None:
                self._checkpoint_refs[pin.checkpoint] += 1

    def ask_returning(self, sessions: Sessions, quarantine: Quarantine) -> None:
        """Limbo and quarantine."""
        for client in sessions.clients.values():
            for _, kind, page in client.limbo:
                self.claim(kind, page, LIMBO)
            for _, _, checkpoint in client.leaving:
                self._checkpoint_refs[checkpoint] += 1
        for ward in quarantine.wards:
            for kind, page in ward.pages:
                self.claim(kind, page, QUARANTINE)

    def ask_tree(self) -> Iterator[None]:
        """The tree: its pages, and whether its counts and locks agree. After the requests and pins."""
        tree = self._store.tree
        found = Counter[str]()
        num_aux: Counter[Node] = Counter()
        for node in tree.nodes():
            found["nodes"] += 1
            found["pages"] += node.num_pages
            self._check_node(node)
            self._ask_column(node, 0)
            for checkpoint in node.checkpoints.values():
                found["checkpoints"] += 1
                self._ask_checkpoint(node, checkpoint)
            for column in range(1, len(node.columns)):
                num_aux[node.root] += self._ask_column(node, column)
            yield
        if found["checkpoints"] != self._store.num_checkpoints:
            self._odd(f"{self._store.num_checkpoints} checkpoints counted, the tree has {found['checkpoints']}")
        if (found["nodes"], found["pages"]) != (tree.num_nodes, tree.num_pages):
            self._odd(f"tree counts {tree.num_nodes} nodes and {tree.num_pages} pages, has {dict(found)}")
        for root in tree.roots.values():
            if root.num_aux != num_aux[root]:
                self._odd(f"namespace {root.salt!r} counts {root.num_aux} draft pages, has {num_aux[root]}")
            if not root.children and not root.num_users:
                self._odd(f"namespace {root.salt!r} is idle and still there")

    def _check_node(self, node: Node) -> None:
        lens = {len(column) for column in node.columns} | {len(node.key) // self._store.tree.page_bytes}
        parent = node.parent
        if len(lens) != 1 or parent is None or parent.end != node.start or not node.num_pages:
            self._odd(f"node at page {node.start} has columns of {lens} pages")
        if node.lock_ref != self._node_refs[node]:
            self._odd(f"node at page {node.start} counts {node.lock_ref} locks, {self._node_refs[node]} hold it")

    def _ask_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        """Claims its pages, which have one count of locks."""
        if checkpoint.node is not node or not node.start < checkpoint.at <= node.end:
            self._odd(f"checkpoint at page {checkpoint.at} hangs on the node [{node.start}, {node.end})")
        refs = self._checkpoint_refs[checkpoint]
        if refs and not node.lock_ref:
            self._odd(f"checkpoint at page {checkpoint.at} is held, and nobody holds the path to it")
        for kind, pages in zip(self._kinds.states, checkpoint.pages, strict=True):
            for page in pages:
                self.claim(kind, page, PINNED if self._pool.state[kind][page] == PINNED else TREE)
                self.locked[kind][page] = refs > 0
                if refs != self._pool.refs[kind][page]:
                    self._odd(f"counts {self._pool.refs[kind][page]} locks, {refs} hold its checkpoint", kind, page)

    def _ask_column(self, node: Node, column: int) -> int:
        """Claims the pages of one column; returns how many there are."""
        kind, num_pages = self._kinds.token[column], 0
        for page in node.columns[column]:
            if not page:
                continue
            num_pages += 1
            self.claim(kind, page, PINNED if self._pool.state[kind][page] == PINNED else TREE)
            refs = node.lock_ref if not column else self._page_refs[kind, page]
            if column and refs != self._pool.refs[kind][page]:
                self._odd(f"counts {self._pool.refs[kind][page]} locks, {refs} hold it", kind, page)
            self.locked[kind][page] = refs > 0
        return num_pages

    def _lock_path(self, node: Node) -> None:
        while node.parent is not None:
            self._node_refs[node] += 1
            node = node.parent

    def claim(self, kind: int, page: int, state: int) -> None:
        """An owner says that it has the page."""
        claims = self.claims[kind]
        if claims[page] != NOBODY:
            self._odd(f"has two owners: {STATE_NAMES[claims[page]]} and {STATE_NAMES[state]}", kind, page)
        claims[page] = state
