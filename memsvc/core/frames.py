"""FramePool: frames cut into pages of a kind, and the state of every page."""

from array import array

from memsvc.core.buckets import Buckets

FREE, PRIVATE, TREE, PINNED, LIMBO, QUARANTINE = range(6)
STATE_NAMES = ("free", "private", "tree", "pinned", "limbo", "quarantine")
RESERVED = 255
"""frame_kind of frames that no kind may have: dummy and exchange."""


class FramePool:
    """All frames of the arena. Every operation on one page is O(1).

    A page that is not free is BLOCKED if it cannot be had by eviction: private, limbo, quarantine,
    pinned, or in the tree under a lock. A frame with a blocked page is locked to its kind; a cut
    frame without one is loose: eviction can empty it. `spare` counts, per kind, the pages in locked
    frames that are free or evictable. Free pages are taken from locked frames first, fullest first:
    that costs no other kind anything.
    """

    def __init__(self, pages_per_frame: tuple[int, ...], num_frames: int, first_frame: int) -> None:
        num_kinds = len(pages_per_frame)
        frame_zeros, kinds = bytes(4 * num_frames), range(num_kinds)
        self.pages_per_frame = pages_per_frame
        self.num_frames = num_frames
        self.first_frame = first_frame
        self.frame_kind = bytearray(num_frames)
        """Kind + 1 of a cut frame, 0 if empty, or RESERVED."""
        self.frame_kind[:first_frame] = bytes([RESERVED]) * first_frame
        self.num_free = array("i", frame_zeros)
        self.num_blocked = array("i", frame_zeros)
        self.first_free = array("i", frame_zeros)
        """Head of the frame's list of pages that were used and freed since the cut."""
        self.num_handed = array("i", frame_zeros)
        """Pages of the frame handed out at least once since the cut; those past it are free, unlisted."""
        self._last_kind = bytearray(num_frames)
        self._num_clean = array("i", frame_zeros)
        self.state = [bytearray(num_frames * n) for n in pages_per_frame]
        self.next_free = [array("i", bytes(4 * num_frames * n)) for n in pages_per_frame]
        self.refs = [array("i", bytes(4 * num_frames * n)) for n in pages_per_frame]
        """Lock counts by page; used for aux kinds only."""
        self.owner = [array("q", bytes(8 * num_frames * n)) for n in pages_per_frame]
        """uid of the request that took the page last."""
        self.stamp = [array("d", bytes(8 * num_frames * n)) for n in pages_per_frame]
        """When the page was taken, or last unlocked."""
        links = (array("i", frame_zeros), array("i", frame_zeros))
        self.locked_holes = Buckets(pages_per_frame, links)
        self.loose_holes = Buckets(pages_per_frame, links)
        self.empty = array("i", range(num_frames - 1, first_frame - 1, -1))
        self.num_loose = 0
        self.spare = [0] * num_kinds
        self.num_cut = [0] * num_kinds
        """Frames cut for each kind."""
        self.counts = [[0] * len(STATE_NAMES) for _ in kinds]
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

    def has_hole(self, kind: int) -> bool:
        """Whether take() needs no eviction."""
        return bool(self.locked_holes.mask[kind] or self.loose_holes.mask[kind] or self.empty)

    def take(self, kind: int, owner: int, now: float) -> int:
        """A free page, now private to owner. The caller has made sure that there is one (has_hole)."""
        if self.locked_holes.mask[kind]:
            frame = self.locked_holes.shift_fullest(kind)
            self.spare[kind] -= 1
            self.num_free[frame] -= 1
        else:
            frame = self._lock_one(kind)
        self.num_blocked[frame] += 1
        page = self.first_free[frame]
        if page and not self.unsure:
            self.first_free[frame] = self.next_free[kind][page]
        else:
            page = self._pop_page(kind, frame)
        counts = self.counts[kind]
        counts[FREE] -= 1
        counts[PRIVATE] += 1
        self.state[kind][page] = PRIVATE
        self.owner[kind][page] = owner
        self.stamp[kind][page] = now
        return page

    def _lock_one(self, kind: int) -> int:
        """A loose or empty frame becomes a locked one; its count of free pages is lowered by one already."""
        frame = self.loose_holes.fullest(kind)
        if frame:
            self.loose_holes.remove(kind, frame, self.num_free[frame])
            self.num_loose -= 1
        else:
            frame = self._cut(kind)
        self.spare[kind] += self.pages_per_frame[kind] - 1
        left = self.num_free[frame] = self.num_free[frame] - 1
        if left:
            self.locked_holes.add(kind, frame, left)
        return frame

    def _cut(self, kind: int) -> int:
        frame = self.empty.pop()
        per_frame = self.pages_per_frame[kind]
        self.frame_kind[frame] = kind + 1
        self.num_free[frame] = per_frame
        self.first_free[frame] = self.num_handed[frame] = 0
        if self._last_kind[frame] != kind + 1:
            self._last_kind[frame] = kind + 1
            self._num_clean[frame] = 0
        self.num_cut[kind] += 1
        self.counts[kind][FREE] += per_frame
        return frame

    def _pop_page(self, kind: int, frame: int) -> int:
        page = self.first_free[frame]
        if page:
            self.first_free[frame] = self.next_free[kind][page]
            clean = True
        else:
            offset = self.num_handed[frame]
            self.num_handed[frame] = offset + 1
            page = frame * self.pages_per_frame[kind] + offset
            clean = offset < self._num_clean[frame]
            if not clean:
                self._num_clean[frame] = offset + 1
        if self.unsure and (kind, page) in self.unsure:
            self.unsure.discard((kind, page))
            clean = False
        if not clean:
            self.to_clear.append((kind, page))
        return page

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

    def drop(self, kind: int, page: int) -> None:
        """An evictable page becomes free."""
        frame = page // self.pages_per_frame[kind]
        if self.num_free[frame]:
            holes = self.locked_holes if self.num_blocked[frame] else self.loose_holes
            holes.remove(kind, frame, self.num_free[frame])
        self._put_back(kind, page, frame)

    def _put_back(self, kind: int, page: int, frame: int) -> None:
        """Count the page as free; an empty frame goes back to all kinds. The frame is in no bucket."""
        states, counts = self.state[kind], self.counts[kind]
        assert states[page] != FREE, f"kind {kind} page {page} is free already"
        counts[states[page]] -= 1
        counts[FREE] += 1
        states[page] = FREE
        free = self.num_free[frame] = self.num_free[frame] + 1
        per_frame = self.pages_per_frame[kind]
        if free == per_frame:
            self.frame_kind[frame] = self.num_free[frame] = 0
            self.num_loose -= 1
            self.num_cut[kind] -= 1
            counts[FREE] -= per_frame
            self.empty.append(frame)
            return
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
