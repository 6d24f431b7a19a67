"""The blocks to draft in one forward, in columns."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBatch:
    """One block per request. A block's context is [context_start, anchor_pos) of the request's page table."""

    rows: np.ndarray
    """int64 [n]: row in the page tables. Row 0 is the dummy request, without context."""
    anchors: np.ndarray
    """int64 [n]: token of the block's first row."""
    anchor_pos: np.ndarray
    """int64 [n]: its position."""
    context_start: np.ndarray
    """int64 [n]: first position whose draft KV may be read."""
    num_drafts: int
    """k: tokens wanted per block."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def block_size(self) -> int:
        """Rows of a block in this forward."""
        return 1 + self.num_drafts

    @property
    def context_len(self) -> int:
        """Tokens of context of all blocks together."""
        return int((self.anchor_pos - self.context_start).sum())

    @property
    def positions(self) -> np.ndarray:
        """int64 [n, B]: row j of a block stands at its anchor's position + j."""
        return self.anchor_pos[:, None] + np.arange(self.block_size)

    def one(self, index: int) -> "BlockBatch":
        """The batch of one block."""
        part = slice(index, index + 1)
        return BlockBatch(
            rows=self.rows[part],
            anchors=self.anchors[part],
            anchor_pos=self.anchor_pos[part],
            context_start=self.context_start[part],
            num_drafts=self.num_drafts,
        )

    def padded(self, num_reqs: int) -> "BlockBatch":
        """The same blocks, then dummy requests up to num_reqs: token 0 at position 0, row 0, no context."""
        missing = num_reqs - len(self)
        assert missing >= 0, f"{len(self)} blocks do not fit a bucket of {num_reqs}"
        if not missing:
            return self
        return BlockBatch(
            rows=np.pad(self.rows, (0, missing)),
            anchors=np.pad(self.anchors, (0, missing)),
            anchor_pos=np.pad(self.anchor_pos, (0, missing)),
            context_start=np.pad(self.context_start, (0, missing)),
            num_drafts=self.num_drafts,
        )
