"""PageStore: frames, tree and eviction queue as one thing. Locks, eviction, and taking pages under a promise."""

from array import array
from typing import Final

from memsvc.core.eviction import Entry, EvictionQueue
from memsvc.core.frames import FramePool
from memsvc.core.kinds import KindTable
from memsvc.core.radix import Checkpoint, Node, RadixTree, path

MAX_EVICT_BATCH: Final = 16
EXPIRE_BATCH: Final = 256
"""Pages of one tail that go at once when their time is over."""
EVICT_SHARE: Final = 128
"""When pages run out so many of one tail go at once: at most 16, and one for 128 frames."""


class PageStore:
    """Pages of the tree are evictable unless locked: the target's with their node, others one by one,
    those of a checkpoint together.

    A lock on a path is held by open requests and pins; a lock on a draft page or on a checkpoint only
    ever by someone who holds the path through it. So a node without a lock has no locked page at all.
    """

    def __init__(self, kinds: KindTable, pool: FramePool, policy: str) -> None:
        self.kinds = kinds
        self.pool = pool
        self.tree = RadixTree(kinds.page_size, len(kinds.token))
        self.queue = EvictionQueue(policy)
        self.now = 0.0
        """Time of the message that is being handled."""
        self.num_evicted = [0] * kinds.num_kinds
        self.num_checkpoints = 0
        self._evict_batch = max(1, min(MAX_EVICT_BATCH, pool.num_frames // EVICT_SHARE))

    # --- locks ---

    def lock_path(self, node: Node) -> None:
        """Hold the target pages from the root to the end of node."""
        held: Node | None = node
        while held is not None and held.parent is not None:
            held.lock_ref += 1
            if held.lock_ref == 1:
                self.lock_first(held)
            held.last_access = self.now
            held = held.parent

    def lock_first(self, node: Node) -> None:
        """The node has got its first lock."""
        self.pool.block(self.kinds.primary, node.columns[0])
        self.queue_aux(node)

    def queue_aux(self, node: Node) -> None:
        """A node with a first lock is no tail any more; its draft pages stay evictable and are queued by themselves."""
        node.epoch += 1
        node.tail_entry = 0
        if node.root.num_aux:
            self.queue.push_range(node, node.start, node.end, node.last_access)

    def unlock_path(self, node: Node) -> None:
        """Let go of what lock_path(node) held. The object `node` may have been split above, never below."""
        held: Node | None = node
        while held is not None and held.parent is not None:
            held.lock_ref -= 1
            held.last_access = self.now
            assert held.lock_ref >= 0, f"node at page {held.start} unlocked more often than locked"
            if not held.lock_ref:
                self.pool.unblock(self.kinds.primary, held.columns[0])
                if not held.children:
                    self.queue.push_tail(held)
            held = held.parent
        self._join_chains(node)

    def _join_chains(self, node: Node) -> None:
        """Runs of unlocked nodes with an only child become one node, so that paths stay short."""
        while node.parent is not None and not node.lock_ref:
            run: list[Node] = []
            above = node.parent
            while above.parent and len(above.children) == 1 and above.last_access <= node.last_access:
                if above.lock_ref:
                    break
                run.append(above)
                above = above.parent
            if run:
                self.tree.absorb_parents(node, run)
            node = above

    def lock_pages(self, kind: int, pages: list[int]) -> None:
        """Hold draft pages of the tree; the caller holds the path through them."""
        self.pool.lock(kind, pages)

    def unlock_pages(self, kind: int, pages: list[int]) -> None:
        """Let go of draft pages. The caller then names their place with note_unlocked()."""
        self.pool.unlock(kind, pages, self.now)

    def note_unlocked(self, node: Node, low: int, high: int) -> None:
        """Draft pages [low, high) of the path to node were unlocked: where the path stays locked, queue them."""
        while node.parent is not None and node.end > low:
            if node.lock_ref and node.start < high:
                self.queue.push_range(node, max(low, node.start), min(high, node.end), self.now)
            node = node.parent

    def split(self, node: Node, num_pages: int) -> Node:
        """Split a node; returns the upper half."""
        upper = self.tree.split(node, num_pages)
        if upper.lock_ref and upper.root.num_aux:
            self.queue.push_range(upper, upper.start, upper.end, self.now)
        return upper

    # --- checkpoints ---

    def lock_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Hold a state; the caller holds the path to it."""
        checkpoint.entry, checkpoint.last_access = 0, self.now
        for kind, pages in zip(self.kinds.states, checkpoint.pages, strict=True):
            self.pool.lock(kind, pages)

    def unlock_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Let go of what lock_checkpoint held, after the path if that is let go too: its tail goes first then."""
        checkpoint.last_access = self.now
        for kind, pages in zip(self.kinds.states, checkpoint.pages, strict=True):
            self.pool.unlock(kind, pages, self.now)
        if not self.is_held(checkpoint):
            self.queue.push_checkpoint(checkpoint)

    def is_held(self, checkpoint: Checkpoint) -> bool:
        """Whether anyone has it locked."""
        for kind, pages in zip(self.kinds.states, checkpoint.pages, strict=True):
            if pages:  # its model may have a part of the kinds only
                return self.pool.refs[kind][pages[0]] > 0
        return False

    def drop_checkpoint(self, checkpoint: Checkpoint) -> int:
        """Free a checkpoint that nobody holds. Returns its number of pages."""
        assert not self.is_held(checkpoint), f"checkpoint at page {checkpoint.at} is dropped under a lock"
        checkpoint.entry = 0
        del checkpoint.node.checkpoints[checkpoint.at]
        self.num_checkpoints -= 1
        for kind, pages in zip(self.kinds.states, checkpoint.pages, strict=True):
            self.pool.drop(kind, pages)
            self.num_evicted[kind] += len(pages)
        return sum(len(pages) for pages in checkpoint.pages)

    # --- eviction ---

    def evict(self, num_pages: int = 1) -> int:
        """Free at least one page, at most about num_pages of each token kind. 0 if nothing can go."""
        while (entry := self.queue.first()) is not None:
            freed = self._evict_entry(entry, num_pages)
            if freed:
                return freed
        return 0

    def expire(self, before: float) -> bool:
        """Evict all that is unused since `before`; the policy orders by time. Whether there was anything."""
        found = False
        while (entry := self.queue.first()) is not None and entry.key[0] <= before:
            found |= self._evict_entry(entry, EXPIRE_BATCH) > 0
        return found

    def _evict_entry(self, entry: Entry, num_pages: int) -> int:
        if entry.checkpoint is not None:
            return self.drop_checkpoint(entry.checkpoint)
        return self._evict_tail(entry, num_pages) if entry.low < 0 else self._evict_range(entry, num_pages)

    def _evict_tail(self, entry: Entry, num_pages: int) -> int:
        node, parent = entry.node, entry.node.parent
        assert parent is not None, "a root is never a tail"
        num_pages = min(num_pages, node.num_pages)
        if num_pages == node.num_pages:
            self.queue.pop()
        freed = 0
        for column, pages in enumerate(self.tree.truncate(node, num_pages)):
            freed += self._drop(column, pages, node)
        for checkpoint in [c for c in node.checkpoints.values() if c.at > node.end]:
            freed += self.drop_checkpoint(checkpoint)
        if not node.columns[0] and parent.parent is not None and not parent.children and not parent.lock_ref:
            self.queue.push_tail(parent)
        return freed

    def _drop(self, column: int, pages: "array[int]", node: Node) -> int:
        if column:
            pages = array("i", filter(None, pages))
            node.root.num_aux -= len(pages)
        kind = self.kinds.token[column]
        self.pool.drop(kind, pages)
        self.num_evicted[kind] += len(pages)
        return len(pages)

    def _evict_range(self, entry: Entry, num_pages: int) -> int:
        node, freed = entry.node, 0
        high = min(entry.high, node.end)
        for index in range(max(entry.low, node.start), high):
            freed += self._evict_aux(node, index - node.start, entry.time)
            if freed >= num_pages:
                self.queue.narrow(index + 1)
                return freed
        self.queue.pop()
        return freed

    def _evict_aux(self, node: Node, offset: int, time: float) -> int:
        """Tombstones for the draft pages at one place, if nobody holds them and none was unlocked after time."""
        freed = 0
        for column in range(1, len(node.columns)):
            kind, page = self.kinds.token[column], node.columns[column][offset]
            if page and not self.pool.refs[kind][page] and self.pool.stamp[kind][page] <= time:
                node.columns[column][offset] = 0
                freed += self._drop(column, array("i", [page]), node)
        return freed

    # --- taking pages ---

    def frames_short(self, pages: list[int]) -> int:
        """Frames that these pages of each kind need beyond what is spare in frames of their kind."""
        frames = 0
        for need, spare, per_frame in zip(pages, self.pool.spare, self.pool.pages_per_frame, strict=True):
            if need > spare:
                frames -= (spare - need) // per_frame
        return frames

    def fits(self, pages: list[int]) -> bool:
        """Whether eviction can make room for these pages of each kind together."""
        return self.frames_short(pages) <= self.pool.frames_available

    def take(self, kind: int, num_pages: int, ahead: list[int]) -> list[int]:
        """Pages whose owner the caller names, evicting where needed.

        `ahead` are pages of each kind that fit, these among them; it is lowered by these, and still
        fits afterwards.
        """
        pool = self.pool
        pages: list[int] = []
        while (left := num_pages - len(pages)) > 0:
            if not pool.locked_holes.mask[kind]:
                self._make_room(kind, ahead)
            taken = pool.take(kind, left, self.now)
            pages += taken
            ahead[kind] -= len(taken)
        return pages

    def _make_room(self, kind: int, ahead: list[int]) -> None:
        """Evict until a page of the kind can be taken without breaking the promise that `ahead` fits.

        A hole in a locked frame never costs anything. A frame of its own costs one of those that
        `ahead` may count on, so it is taken only if the count still comes out; else eviction goes
        on until a page in a locked frame is free, which the promise says will happen. (Once the
        frame is taken its other free pages are holes in a locked frame.) A frame that is mostly
        cached text is not taken: eviction goes on to an empty one.
        """
        pool = self.pool
        while not pool.locked_holes.mask[kind]:
            if pool.has_roomy_frame(kind) and self._frame_to_spare(kind, ahead):
                return
            freed = self.evict(self._evict_batch)
            assert freed, f"nothing to evict for kind {kind}: ahead {ahead}, spare {pool.spare}"

    def _frame_to_spare(self, kind: int, ahead: list[int]) -> bool:
        pool = self.pool
        if ahead[kind] > pool.spare[kind]:
            return True
        return self.frames_short(ahead) <= pool.frames_available - 1

    def tree_pages(self, node: Node, num_pages: int) -> list[list[int]]:
        """The page ids of the first num_pages on the path to node, by column."""
        columns: list[list[int]] = [[] for _ in self.kinds.token]
        for part in path(node):
            for column, pages in zip(columns, part.columns, strict=True):
                column += pages
        return [column[:num_pages] for column in columns]

    def window_start(self, kind: int, columns: list[list[int]], num_pages: int) -> int:
        """First page of the longest run without a tombstone that ends at num_pages, within the kind's window."""
        window = self.kinds.windows[kind] // self.kinds.page_size
        first = max(0, num_pages - window) if window else 0
        tail = columns[self.kinds.token.index(kind)][first:num_pages]
        if 0 not in tail:
            return first
        tail.reverse()
        return num_pages - tail.index(0)
