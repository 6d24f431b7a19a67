"""What goes first when pages run out: a queue of conversation tails and of draft pages nobody reads."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from memsvc.core.radix import Node

Key = tuple[float, ...]


def lru(node: Node, now: float) -> Key:
    """Longest unused first."""
    return (now,)


def lfu(node: Node, now: float) -> Key:
    """Fewest hits first, then longest unused."""
    return (node.hits, now)


def priority(node: Node, now: float) -> Key:
    """Lowest priority of the requests that used it first, then longest unused."""
    return (node.priority, now)


POLICIES: dict[str, Callable[[Node, float], Key]] = {"lru": lru, "lfu": lfu, "priority": priority}


class Entry(NamedTuple):
    """One thing that may be evicted; the smallest goes first.

    A tail (low < 0) is the end of an unlocked node without children, valid while node.tail_entry is
    its num. A range is the draft pages [low, high) of a LOCKED node, valid while node.epoch is its
    epoch; of these it may evict pages without a lock that were not unlocked after `time`.
    """

    key: Key
    num: int
    node: Node
    low: int
    high: int
    epoch: int
    time: float


class EvictionQueue:
    """A heap of entries; stale ones are dropped when met, or when they are more than half."""

    MIN_COMPACT = 4096

    def __init__(self, policy: str) -> None:
        self._key = POLICIES[policy]
        self._heap: list[Entry] = []
        self._nums = count(1)
        self._compact_at = self.MIN_COMPACT

    def __len__(self) -> int:
        return len(self._heap)

    def push_tail(self, node: Node) -> None:
        """node has no children and no lock any more."""
        num = node.tail_entry = next(self._nums)
        self._push(Entry(self._key(node, node.last_access), num, node, -1, -1, 0, 0.0))

    def push_range(self, node: Node, low: int, high: int, time: float) -> None:
        """Draft pages [low, high) of a locked node may be without a lock."""
        self._push(Entry(self._key(node, time), next(self._nums), node, low, high, node.epoch, time))

    def _push(self, entry: Entry) -> None:
        if len(self._heap) >= self._compact_at:
            self._heap = [old for old in self._heap if is_valid(old)]
            heapq.heapify(self._heap)
            self._compact_at = max(self.MIN_COMPACT, 2 * len(self._heap))
        heapq.heappush(self._heap, entry)

    def first(self) -> Entry | None:
        """The entry to evict from now. It stays until popped."""
        heap = self._heap
        while heap and not is_valid(heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def pop(self) -> None:
        """Remove the entry that first() answered."""
        entry = heapq.heappop(self._heap)
        if entry.low < 0:
            entry.node.tail_entry = 0

    def narrow(self, low: int) -> None:
        """The range that first() answered begins at low from now on."""
        heapq.heapreplace(self._heap, self._heap[0]._replace(low=low))

    def entries(self) -> list[Entry]:
        """The valid entries in no order, for the invariant check."""
        return [entry for entry in self._heap if is_valid(entry)]


def is_valid(entry: Entry) -> bool:
    """Whether the entry still stands for something."""
    node = entry.node
    if entry.low < 0:
        return node.tail_entry == entry.num
    return node.lock_ref > 0 and node.epoch == entry.epoch
