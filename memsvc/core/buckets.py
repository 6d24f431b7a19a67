"""Frames with free pages, in lists by how many: add, remove, fullest and emptiest are O(1)."""


class Buckets:
    """Per kind and number of free pages a doubly linked list of frames; frame 0 is the end of each.

    A frame is in at most one Buckets at a time, so two of them can share the links.
    """

    def __init__(self, pages_per_frame: tuple[int, ...], links: tuple[list[int], list[int]]) -> None:
        self.heads = [[0] * (n + 1) for n in pages_per_frame]
        self.mask = [0] * len(pages_per_frame)
        """Bit n is set if a frame with n free pages is there."""
        self._next, self._prev = links

    def fullest(self, kind: int) -> int:
        """The frame with the fewest free pages, 0 if there is none."""
        mask = self.mask[kind]
        if not mask:
            return 0
        return self.heads[kind][(mask & -mask).bit_length() - 1]

    def emptiest(self, kind: int) -> int:
        """The frame with the most free pages, 0 if there is none."""
        mask = self.mask[kind]
        return self.heads[kind][mask.bit_length() - 1] if mask else 0

    def add(self, kind: int, frame: int, num_free: int) -> None:
        """Put the frame in front of its list."""
        heads = self.heads[kind]
        head = heads[num_free]
        self._next[frame] = head
        self._prev[frame] = 0
        if head:
            self._prev[head] = frame
        else:
            self.mask[kind] |= 1 << num_free
        heads[num_free] = frame

    def remove(self, kind: int, frame: int, num_free: int) -> None:
        """Take the frame out of the list of num_free."""
        after, before = self._next[frame], self._prev[frame]
        if after:
            self._prev[after] = before
        if before:
            self._next[before] = after
            return
        self.heads[kind][num_free] = after
        if not after:
            self.mask[kind] ^= 1 << num_free

    def frames(self, kind: int, num_free: int) -> list[int]:
        """All frames of one list, for the invariant check."""
        found, frame = [], self.heads[kind][num_free]
        while frame:
            found.append(frame)
            frame = self._next[frame]
        return found
