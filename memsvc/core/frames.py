"""FramePool: frames cut into pages of a kind, and the state of every page."""

from array import array
from typing import Final

from memsvc.core.buckets import Buckets
from memsvc.core.page_states import FREE, PRIVATE, STATE_NAMES, TREE

RESERVED: Final = 255
"""frame_kind of frames that no kind may have: dummy, exchange and shared weights."""


class FramePool:
    """All frames of the arena. Every operation on one page is O(1).

    A page that is not free is BLOCKED if it cannot be had by eviction: private, limbo, quarantine,
    pinned, or in the tree under a lock. A frame with a blocked page is locked to its kind; a cut
    frame without one is loose: eviction can empty it. `spare` counts, per kind, the pages in locked
    frames that are free or evictable. Free pages are taken from locked frames first, fullest first:
    that costs no other kind anything. Then comes an empty frame, then the emptiest loose one.
    """

    def __init__(self, pages_per_frame: tuple[int, ...], num_frames: int, first_frame: int) -> None:
        num_kinds = len(pages_per_frame)
        sizes = [num_frames * n for n in pages_per_frame]
        self.pages_per_frame = pages_per_frame
        self.num_frames = num_frames
        self.first_frame = first_frame
        # plain lists of small or shared ints: reading and writing an array's item costs ten times as much
        self.frame_kind = [RESERVED] * first_frame + [0] * (num_frames - first_frame)
        """Kind + 1 of a cut frame, 0 if empty, or RESERVED."""
        self.num_free = [0] * num_frames
        self.num_blocked = [0] * num_frames
        self.first_free = [0] * num_frames
        """Head of the frame's list of pages that were used and freed since the cut."""
        self.num_handed = [0] * num_frames
        """Pages of the frame handed out at least once since the cut; those past it are free, unlisted."""
        self._last_kind = [0] * num_frames
        self._num_clean = [0] * num_frames
        self.state = [[FREE] * size for size in sizes]
        self.next_free = [[0] * size for size in sizes]
        self.refs = [[0] * size for size in sizes]
        """Lock counts by page; used for aux kinds only."""
        self.owner = [[0] * size for size in sizes]
        """uid of the request that had the page last; set by who takes it."""
        self.stamp = [[0.0] * size for size in sizes]
        """When the page was taken, or last unlocked."""
        links = ([0] * num_frames, [0] * num_frames)
        self.locked_holes = Buckets(pages_per_frame, links)
        self.loose_holes = Buckets(pages_per_frame, links)
        self.empty = list(range(num_frames - 1, first_frame - 1, -1))
        self.num_loose = 0
        self.spare = [0] * num_kinds
        self.num_cut = [0] * num_kinds
        """Frames cut for each kind."""
        self.counts = [[0] * len(STATE_NAMES) for _ in sizes]
        """Pages of each kind by state, over cut frames."""
        self.unsure: set[tuple[int, int]] = set()
        """(kind, page) whose taker may have died before it cleared them."""
        self.to_clear: list[tuple[int, int]] = []
        """(kind, page) taken since the caller last emptied this list that hold another kind's bytes."""

    @property
    def frames_available(self) -> int:
        """Frames that any kind can have: empty now, or emptied by eviction."""
        return len(self.empty) + self.num_loose

    def available(self, kind: int) -> int:
        """Pages of one kind that are free or can be had by eviction. Never add these up over kinds."""
        return self.spare[kind] + self.frames_available * self.pages_per_frame[kind]

    def has_roomy_frame(self, kind: int) -> bool:
        """Whether there is an empty frame, or a loose one that is free by half."""
        return bool(self.empty) or self.loose_holes.mask[kind] >> (self.pages_per_frame[kind] + 1) // 2 > 0

    def take(self, kind: int, num_pages: int, now: float) -> list[int]:
        """At most num_pages free pages, at least one, now private; the caller names their owner.

        The caller has made sure that there is one. Pages come from one frame, or, where
        a page fills its frame, from empty frames.
        """
        per_frame = self.pages_per_frame[kind]
        pages = self._take_frames(kind, num_pages) if per_frame == 1 else self._take_from_one(kind, num_pages)
        counts, states, stamp = self.counts[kind], self.state[kind], self.stamp[kind]
        counts[FREE] -= len(pages)
        counts[PRIVATE] += len(pages)
        for page in pages:
            states[page] = PRIVATE
            stamp[page] = now
        if self.unsure:
            unsure = self.unsure.intersection((kind, page) for page in pages)
            self.unsure -= unsure
            self.to_clear += unsure.difference(self.to_clear)
        return pages

    def _take_frames(self, kind: int, num_pages: int) -> list[int]:
        frames = self.empty[-num_pages:]
        del self.empty[-num_pages:]
        label, last_kind = kind + 1, self._last_kind
        for frame in frames:
            self.frame_kind[frame] = label
            self.num_blocked[frame] = self.num_handed[frame] = 1
            self.first_free[frame] = 0
            if last_kind[frame] != label:
                last_kind[frame] = label
                self.to_clear.append((kind, frame))
        self.num_cut[kind] += len(frames)
        self.counts[kind][FREE] += len(frames)
        return frames

    def _take_from_one(self, kind: int, num_pages: int) -> list[int]:
        frame = self.locked_holes.fullest(kind)
        if frame:
            free = self.num_free[frame]
            self.locked_holes.remove(kind, frame, free)
        else:
            frame = self._loose_frame(kind)
            free = self.num_free[frame]
            self.spare[kind] += self.pages_per_frame[kind]
        num = min(num_pages, free)
        self.num_blocked[frame] += num
        self.spare[kind] -= num
        left = self.num_free[frame] = free - num
        if left:
            self.locked_holes.add(kind, frame, left)
        return self._pop_pages(kind, frame, num)

    def _loose_frame(self, kind: int) -> int:
        """A frame without blocked pages that is about to get one: an empty one, else the loose one with most room.

        So as few cached pages as possible get locked in with it, where only their own kind can use them.
        """
        frame = 0 if self.empty else self.loose_holes.emptiest(kind)
        if frame:
            self.loose_holes.remove(kind, frame, self.num_free[frame])
            self.num_loose -= 1
            return frame
        frame, per_frame = self.empty.pop(), self.pages_per_frame[kind]
        self.frame_kind[frame] = kind + 1
        self.num_free[frame] = per_frame
        self.first_free[frame] = self.num_handed[frame] = 0
        if self._last_kind[frame] != kind + 1:
            self._last_kind[frame] = kind + 1
            self._num_clean[frame] = 0
        self.num_cut[kind] += 1
        self.counts[kind][FREE] += per_frame
        return frame

    def _pop_pages(self, kind: int, frame: int, num_pages: int) -> list[int]:
        """Free pages of the frame, used ones first; those that hold another kind's bytes are noted in to_clear."""
        pages: list[int] = []
        page, next_free = self.first_free[frame], self.next_free[kind]
        while page and len(pages) < num_pages:
            pages.append(page)
            page = next_free[page]
        self.first_free[frame] = page
        fresh = num_pages - len(pages)
        if fresh:
            first, handed = frame * self.pages_per_frame[kind], self.num_handed[frame]
            handed_after = self.num_handed[frame] = handed + fresh
            pages += range(first + handed, first + handed_after)
            clean = max(handed, self._num_clean[frame])
            if handed_after > clean:
                self._num_clean[frame] = handed_after
                self.to_clear += [(kind, page) for page in range(first + clean, first + handed_after)]
        return pages

    def free(self, kind: int, page: int) -> None:
        """A blocked page becomes free: private, limbo or quarantine."""
        per_frame = self.pages_per_frame[kind]
        frame = page // per_frame
        blocked = self.num_blocked[frame] = self.num_blocked[frame] - 1
        assert blocked >= 0, f"kind {kind} page {page}: frame {frame} had no blocked page"
        if self.num_free[frame]:
            self.locked_holes.remove(kind, frame, self.num_free[frame])
        if blocked:
            self.spare[kind] += 1
        else:
            self.spare[kind] -= per_frame - 1
            self.num_loose += 1
        self._put_back(kind, page, frame)

    def drop(self, kind: int, pages: "array[int] | list[int]") -> None:
        """Evictable pages become free."""
        per_frame, num_free, num_blocked = self.pages_per_frame[kind], self.num_free, self.num_blocked
        if per_frame == 1:
            self._drop_frames(kind, pages)
            return
        for page in pages:
            frame = page // per_frame
            free = num_free[frame]
            if free:
                (self.locked_holes if num_blocked[frame] else self.loose_holes).remove(kind, frame, free)
            self._put_back(kind, page, frame)

    def _drop_frames(self, kind: int, pages: "array[int] | list[int]") -> None:
        """The same where a page fills its frame."""
        states = self.state[kind]
        for page in pages:
            assert states[page] == TREE, f"kind {kind} page {page} is {STATE_NAMES[states[page]]}, not in the tree"
            states[page] = FREE
            self.frame_kind[page] = 0
        num = len(pages)
        self.counts[kind][TREE] -= num
        self.num_loose -= num
        self.num_cut[kind] -= num
        self.empty += pages

    def _put_back(self, kind: int, page: int, frame: int) -> None:
        """Count the page as free; an empty frame goes back to all kinds. The frame is in no bucket."""
        states, counts = self.state[kind], self.counts[kind]
        state = states[page]
        assert state != FREE, f"kind {kind} page {page} is free already"
        counts[state] -= 1
        states[page] = FREE
        free = self.num_free[frame] + 1
        per_frame = self.pages_per_frame[kind]
        if free == per_frame:
            self.frame_kind[frame] = self.num_free[frame] = 0
            self.num_loose -= 1
            self.num_cut[kind] -= 1
            counts[FREE] -= per_frame - 1
            self.empty.append(frame)
            return
        counts[FREE] += 1
        self.num_free[frame] = free
        self.next_free[kind][page] = self.first_free[frame]
        self.first_free[frame] = page
        (self.locked_holes if self.num_blocked[frame] else self.loose_holes).add(kind, frame, free)

    def block(self, kind: int, pages: "array[int] | list[int]") -> None:
        """Evictable pages cannot be evicted any more."""
        per_frame, num_blocked, num_free = self.pages_per_frame[kind], self.num_blocked, self.num_free
        locked = 0
        for page in pages:
            frame = page // per_frame
            blocked = num_blocked[frame]
            num_blocked[frame] = blocked + 1
            if not blocked:
                locked += 1
                if num_free[frame]:
                    self.loose_holes.remove(kind, frame, num_free[frame])
                    self.locked_holes.add(kind, frame, num_free[frame])
        self.num_loose -= locked
        self.spare[kind] += locked * per_frame - len(pages)

    def unblock(self, kind: int, pages: "array[int] | list[int]") -> None:
        """Blocked pages of the tree can be evicted again."""
        per_frame, num_blocked, num_free = self.pages_per_frame[kind], self.num_blocked, self.num_free
        loosened = 0
        for page in pages:
            frame = page // per_frame
            blocked = num_blocked[frame] = num_blocked[frame] - 1
            if not blocked:
                loosened += 1
                if num_free[frame]:
                    self.locked_holes.remove(kind, frame, num_free[frame])
                    self.loose_holes.add(kind, frame, num_free[frame])
        self.num_loose += loosened
        self.spare[kind] += len(pages) - loosened * per_frame

    def lock(self, kind: int, pages: "array[int] | list[int]") -> None:
        """One more lock on each of these pages of the tree; block those that had none."""
        refs = self.refs[kind]
        for page in pages:
            refs[page] += 1
        self.block(kind, [page for page in pages if refs[page] == 1])

    def unlock(self, kind: int, pages: "array[int] | list[int]", now: float) -> None:
        """One lock less on each of these pages; unblock those that have none left."""
        refs, stamp = self.refs[kind], self.stamp[kind]
        for page in pages:
            left = refs[page] = refs[page] - 1
            if not left:
                stamp[page] = now
        assert all(refs[page] >= 0 for page in pages), f"kind {kind}: unlocked more often than locked: {pages}"
        self.unblock(kind, [page for page in pages if not refs[page]])

    def set_state(self, kind: int, page: int, state: int) -> None:
        """From one blocked state to another, or between tree and pinned."""
        states, counts = self.state[kind], self.counts[kind]
        counts[states[page]] -= 1
        counts[state] += 1
        states[page] = state

    def publish(self, kind: int, pages: "array[int] | list[int]") -> None:
        """Private pages become pages of the tree under a lock."""
        states, counts = self.state[kind], self.counts[kind]
        for page in pages:
            assert states[page] == PRIVATE, f"kind {kind} page {page} is {STATE_NAMES[states[page]]}, not private"
            states[page] = TREE
        num = len(pages)
        counts[PRIVATE] -= num
        counts[TREE] += num

    def hold(self, kind: int, pages: list[int]) -> None:
        """The one lock on each of these pages is that of the request that published them."""
        refs = self.refs[kind]
        for page in pages:
            refs[page] = 1
