"""RadixTree: which tokens are cached, in which pages. Knows nothing of frames, requests or eviction order."""

from array import array
from collections.abc import Iterator
from typing import Final

TOKEN_BYTES: Final = 4
"""Tokens are packed int32 wherever memsvc sees them."""


class Node:
    """A run of whole pages. Page i of a path is at index i - start of its node's columns.

    Column 0 holds the target's page ids, further columns those of the other token kinds, 0 for a
    tombstone. Every holder of a lock on a node holds all of it: a lock that ends inside splits it.
    The lower half of a split is the old object, so whoever points at a node points at its end.
    """

    __slots__ = (
        "checkpoints",
        "children",
        "columns",
        "epoch",
        "hits",
        "key",
        "last_access",
        "lock_ref",
        "parent",
        "priority",
        "root",
        "start",
        "tail_entry",
    )

    def __init__(self, parent: "Node | None", start: int, key: bytes | bytearray, columns: "list[array[int]]") -> None:
        self.parent = parent
        self.start = start
        self.key = bytearray(key)
        self.columns = columns
        self.children: dict[bytes, Node] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        """States that stand inside this node or at its end, by pages from the root."""
        self.root: Root = parent.root if parent else self  # type: ignore[assignment]
        self.lock_ref = 0
        """Open requests and pins whose path goes through this node."""
        self.epoch = 0
        """Counts the times the node was locked anew, so that older queue entries are seen to be stale."""
        self.last_access = 0.0
        self.hits = 0
        self.priority = 0
        self.tail_entry = 0
        """Number of the queue entry that may evict the node's end, 0 if none."""

    @property
    def num_pages(self) -> int:
        """Pages of this node alone."""
        return len(self.columns[0])

    @property
    def end(self) -> int:
        """Pages from the root to the end of this node."""
        return self.start + len(self.columns[0])


class Checkpoint:
    """A frozen state at a page boundary of a path. It goes with the page before it."""

    __slots__ = ("at", "entry", "last_access", "node", "pages")

    def __init__(self, node: Node, at: int, pages: list[list[int]], now: float) -> None:
        self.node = node
        self.at = at
        """Pages from the root to where it stands; start < at <= end of its node."""
        self.pages = pages
        """Page ids, by kind of KindTable.states."""
        self.last_access = now
        self.entry = 0
        """Number of the queue entry that may evict it, 0 if none: it is locked."""


class Root(Node):
    """The empty node on top of one namespace: a model and a salt."""

    __slots__ = ("aux_label", "fingerprint", "num_aux", "num_users", "salt")

    def __init__(self, fingerprint: str, salt: str, num_columns: int) -> None:
        super().__init__(None, 0, b"", [array("i") for _ in range(num_columns)])
        self.fingerprint = fingerprint
        self.salt = salt
        self.aux_label = ""
        """Fingerprint of the model whose pages the further columns hold."""
        self.num_aux = 0
        """Page ids in the further columns, over the whole namespace."""
        self.num_users = 0
        """Open requests of this namespace; it outlives them."""


class RadixTree:
    """Paths of page-aligned tokens, as packed int32, below one root per namespace."""

    def __init__(self, page_size: int, num_columns: int) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self.num_columns = num_columns
        self.roots: dict[tuple[str, str], Root] = {}
        self.num_nodes = 0
        """Nodes without the roots."""
        self.num_pages = 0
        """Pages of all paths, tombstones included."""

    def root(self, fingerprint: str, salt: str) -> Root:
        """The root of a namespace, made if it is new."""
        found = self.roots.get((fingerprint, salt))
        if found is None:
            found = self.roots[fingerprint, salt] = Root(fingerprint, salt, self.num_columns)
        return found

    def match(self, root: Node, tokens: bytes, num_pages: int) -> tuple[Node, int]:
        """The deepest node that shares pages with the first num_pages of tokens, and how many of its own it shares."""
        step, position, end = self.page_bytes, 0, num_pages * self.page_bytes
        node, shared = root, 0
        while position < end:
            child = node.children.get(tokens[position : position + step])
            if child is None:
                break
            node, shared = child, self.common_pages(child, tokens, position, end)
            position += shared * step
            if shared < len(child.columns[0]):
                break
        return node, shared

    def common_pages(self, node: Node, tokens: bytes, position: int, end: int) -> int:
        """Pages of node that equal tokens[position:end]; the first is known to."""
        step, key = self.page_bytes, node.key
        if len(key) <= end - position and tokens.startswith(key, position):
            return len(key) // step
        low, high = 1, min(len(key), end - position) // step
        while low < high:
            middle = (low + high + 1) // 2
            a, b = low * step, middle * step
            if key[a:b] == tokens[position + a : position + b]:
                low = middle
            else:
                high = middle - 1
        return low

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a node after its first num_pages; returns the new upper half. The lower half keeps its identity."""
        parent, cut = node.parent, num_pages * self.page_bytes
        assert parent is not None, "the root has no pages to split"
        assert 0 < num_pages < node.num_pages, f"split at {num_pages} of {node.num_pages} pages"
        upper = Node(parent, node.start, node.key[:cut], [column[:num_pages] for column in node.columns])
        upper.lock_ref, upper.last_access = node.lock_ref, node.last_access
        upper.hits, upper.priority = node.hits, node.priority
        parent.children[self._first(node)] = upper
        for at in [at for at in node.checkpoints if at <= upper.end]:
            upper.checkpoints[at] = node.checkpoints.pop(at)
            upper.checkpoints[at].node = upper
        del node.key[:cut]
        for column in node.columns:
            del column[:num_pages]
        node.start += num_pages
        node.parent = upper
        upper.children[self._first(node)] = node
        self.num_nodes += 1
        return upper

    def append(self, node: Node, key: bytes, columns: list[list[int]]) -> Node:
        """Put pages after the end of node, as its child. Columns left out are tombstones. Returns the child."""
        child = Node(node, node.end, b"", [array("i") for _ in range(self.num_columns)])
        self.extend(child, key, columns)
        node.children[self._first(child)] = child
        self.num_nodes += 1
        return child

    def extend(self, node: Node, key: bytes | bytearray, columns: list[list[int]]) -> None:
        """Put pages after the end of a node without children, into the node itself."""
        node.key += key
        self.num_pages += len(columns[0])
        for column in range(self.num_columns):
            pages = columns[column] if column < len(columns) else [0] * len(columns[0])
            node.columns[column].fromlist(pages)

    def truncate(self, node: Node, num_pages: int) -> "list[array[int]]":
        """Cut the last num_pages off a node without children; an emptied node leaves the tree. Returns the columns."""
        assert not node.children, "pages below the cut"
        left = node.num_pages - num_pages
        assert left >= 0, f"cut {num_pages} of {node.num_pages} pages"
        removed = [column[left:] for column in node.columns]
        if not left:
            self._remove(node)
        for column in node.columns:
            del column[left:]
        del node.key[left * self.page_bytes :]
        self.num_pages -= num_pages
        return removed

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "the root stays"
        del parent.children[self._first(node)]
        self.num_nodes -= 1
        if parent is parent.root:
            self.forget_if_idle(parent.root)

    def forget_if_idle(self, root: Root) -> None:
        """Drop a namespace that holds nothing and serves nobody."""
        if not root.children and not root.num_users:
            self.roots.pop((root.fingerprint, root.salt), None)

    def absorb_parents(self, node: Node, run: list[Node]) -> None:
        """Make one node of `run`, the chain of only-child parents right above node, lowest first. node stays."""
        top = run[-1]
        parent = top.parent
        assert parent is not None, "the root is no part of a run"
        parts = [*reversed(run), node]
        node.key = bytearray().join(part.key for part in parts)
        for index in range(self.num_columns):
            whole = array("i")
            for part in parts:
                whole.extend(part.columns[index])
            node.columns[index] = whole
        for part in run:
            node.checkpoints |= part.checkpoints
        for checkpoint in node.checkpoints.values():
            checkpoint.node = node
        node.start = top.start
        node.hits = max(part.hits for part in parts)
        node.priority = max(part.priority for part in parts)
        node.parent = parent
        parent.children[self._first(node)] = node
        self.num_nodes -= len(run)

    def _first(self, node: Node) -> bytes:
        return bytes(node.key[: self.page_bytes])

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents first, roots left out."""
        for root in self.roots.values():
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                yield node
                stack.extend(node.children.values())


def path(node: Node) -> list[Node]:
    """From the first node below the root down to node; empty for a root."""
    nodes = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


def checkpoints_up(node: Node, at: int) -> "Iterator[Checkpoint]":
    """Checkpoints on the path to node that stand at page `at` or before, the last first."""
    while node.parent is not None:
        for place in sorted(node.checkpoints, reverse=True):
            if place <= at:
                yield node.checkpoints[place]
        node = node.parent
