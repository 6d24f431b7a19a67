"""What goes first when pages run out: a queue of conversation tails, checkpoints, and draft pages nobody reads."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Final

from memsvc.core.radix import Checkpoint, Node

Key = tuple[float, ...]

PROTECTED_HITS: Final = 2
"""Under slru, text that so many requests have come back to goes after all that fewer have."""


def lru(node: Node, now: float) -> Key:
    """Longest unused first."""
    return (now,)


def lfu(node: Node, now: float) -> Key:
    """Fewest hits first, then longest unused."""
    return (node.hits, now)


def slru(node: Node, now: float) -> Key:
    """What was hit less than twice first, then longest unused: one long scan does not push out shared prompts."""
    return (node.hits >= PROTECTED_HITS, now)


def priority(node: Node, now: float) -> Key:
    """Lowest priority of the requests that used it first, then longest unused."""
    return (node.priority, now)


POLICIES: dict[str, Callable[[Node, float], Key]] = {
    "lru": lru,
    "lfu": lfu,
    "slru": slru,
    "priority": priority,
    "ttl": lru,
}


class Entry:
    """One thing that may be evicted.

    A tail (low < 0) is the end of an unlocked node without children, valid while node.tail_entry is
    its num. A checkpoint is one without a lock, valid while its entry is this num. A range is the
    draft pages [low, high) of a LOCKED node, valid while node.epoch is its epoch; of these it may
    evict pages without a lock that were not unlocked after `time`.
    """

    __slots__ = ("checkpoint", "epoch", "high", "key", "low", "node", "num", "time")

    def __init__(self, key: Key, num: int, node: Node, time: float = 0.0) -> None:
        self.key = key
        """By the policy; the smallest goes first, and of equal ones the older entry."""
        self.num = num
        self.node = node
        self.low = self.high = -1
        self.epoch = node.epoch
        self.time = time
        self.checkpoint: Checkpoint | None = None


class EvictionQueue:
    """A heap of entries; stale ones are dropped when met, or when they are more than half."""

    MIN_COMPACT = 4096

    def __init__(self, policy: str) -> None:
        self._key = POLICIES[policy]
        self._heap: list[tuple[Key, int, Entry]] = []
        self._nums = count(1)
        self._compact_at = self.MIN_COMPACT

    def __len__(self) -> int:
        return len(self._heap)

    def push_tail(self, node: Node) -> None:
        """node has no children and no lock any more."""
        num = node.tail_entry = next(self._nums)
        self._push(Entry(self._key(node, node.last_access), num, node))

    def push_range(self, node: Node, low: int, high: int, time: float) -> None:
        """Draft pages [low, high) of a locked node may be without a lock."""
        entry = Entry(self._key(node, time), next(self._nums), node, time)
        entry.low, entry.high = low, high
        self._push(entry)

    def push_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Nobody holds the checkpoint any more."""
        num = checkpoint.entry = next(self._nums)
        entry = Entry(self._key(checkpoint.node, checkpoint.last_access), num, checkpoint.node)
        entry.checkpoint = checkpoint
        self._push(entry)

    def _push(self, entry: Entry) -> None:
        if len(self._heap) >= self._compact_at:
            self._heap = [old for old in self._heap if is_valid(old[2])]
            heapq.heapify(self._heap)
            self._compact_at = max(self.MIN_COMPACT, 2 * len(self._heap))
        heapq.heappush(self._heap, (entry.key, entry.num, entry))

    def first(self) -> Entry | None:
        """The entry to evict from now. It stays until popped."""
        heap = self._heap
        while heap and not is_valid(heap[0][2]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> None:
        """Remove the entry that first() answered."""
        entry = heapq.heappop(self._heap)[2]
        if entry.checkpoint is not None:
            entry.checkpoint.entry = 0
        elif entry.low < 0:
            entry.node.tail_entry = 0

    def narrow(self, low: int) -> None:
        """The range that first() answered begins at low from now on."""
        self._heap[0][2].low = low

    def entries(self) -> list[Entry]:
        """The valid entries in no order, for the invariant check."""
        return [entry for _, _, entry in self._heap if is_valid(entry)]


def is_valid(entry: Entry) -> bool:
    """Whether the entry still stands for something."""
    node = entry.node
    if entry.checkpoint is not None:
        return entry.checkpoint.entry == entry.num
    if entry.low < 0:
        return node.tail_entry == entry.num
    return node.lock_ref > 0 and node.epoch == entry.epoch
