"""Where rows stand: which position each row of a batch has, and which page and offset that is."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRows:
    """B rows for each place of a bucket: row j of place i has position lengths[members[i]] + j.

    A prefill chunk of one request is a block as well: one member, lengths where the chunk begins, B its rows.
    """

    members: torch.Tensor
    """int32 [N]: slot of each place."""
    lengths: torch.Tensor
    """int32 [num_slots + 1]: position of the first row of a slot's block."""
    block_size: int
    """B."""
    page_table: torch.Tensor | None = None
    """int32 [num_slots + 1, max_pages]; needed where rows are written to pages."""
    done: torch.Tensor | None = None
    """int32 [num_slots + 1]: rows of a slot that is done are written to page 0."""

    @property
    def num_rows(self) -> int:
        """N * B."""
        return len(self.members) * self.block_size


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """Rows of any requests, as an eager prefill has them: the host says where each stands."""

    positions: torch.Tensor
    """int32 or int64 [n]"""
    slots: torch.Tensor | None = None
    """int64 [n]: page * page_size + offset, from PageTables.slots; needed where rows are written to pages."""

    @property
    def num_rows(self) -> int:
        """n."""
        return len(self.positions)


Rows = BlockRows | TokenRows


@triton.jit
def find_page(position, member, done, page_table, table_stride, table_width, PAGE: tl.constexpr):
    """(page id int64, offset) of a slot's position: page 0 if the slot is done or its row has no such place."""
    index = position // PAGE
    inside = index < table_width
    if done is not None:
        inside = inside & (tl.load(done + member) == 0)
    page = tl.load(page_table + member.to(tl.int64) * table_stride + index, mask=inside, other=0)
    return page.to(tl.int64), position % PAGE


@triton.jit
def find_row(row, positions, members, B: tl.constexpr):
    """(position, slot) of a row: positions is lengths by slot if there are members, else it is by row."""
    if members is not None:
        member = tl.load(members + row // B)
        return (tl.load(positions + member) + row % B).to(tl.int32), member
    else:
        return tl.load(positions + row).to(tl.int32), 0


@triton.jit
def cos_and_sin(position, frequencies, scale, HALF: tl.constexpr, PAD: tl.constexpr):
    """cos and sin float32 [PAD] of position times frequencies [HALF], times scale, as rope.Rotary.tables has them."""
    dims = tl.arange(0, PAD)
    angle = position.to(tl.float32) * tl.load(frequencies + dims, mask=dims < HALF, other=0.0)
    # These are the exact ones (libdevice), not the GPU's own, which are good near zero only.
    return tl.cos(angle) * scale, tl.sin(angle) * scale


def row_arguments(rows: Rows, page_size: int) -> dict[str, object]:
    """What kernels call positions, members, done, page_table, slots, their sizes, B and PAGE.

    page_size: 0 if nothing goes to pages. Raises ValueError if rows do not say in which pages they stand.
    """
    given: dict[str, object] = {
        "members": None, "done": None, "page_table": None, "slots": None, "table_stride": 0, "table_width": 0, "B": 1,
        "PAGE": page_size,
    }  # fmt: skip
    if isinstance(rows, TokenRows):
        if page_size and rows.slots is None:
            raise ValueError("rows go to pages, but TokenRows has no slots")
        return given | {"positions": rows.positions, "slots": rows.slots if page_size else None}
    given |= {"positions": rows.lengths, "members": rows.members, "B": rows.block_size}
    if not page_size:
        return given
    if rows.page_table is None:
        raise ValueError("rows go to pages, but BlockRows has no page_table")
    table = rows.page_table
    given |= {"done": rows.done, "page_table": table, "table_stride": table.stride(0), "table_width": table.shape[1]}
    return given
