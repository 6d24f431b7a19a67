"""Replay rings in pages: some pages together hold the newest raw inputs of one linear layer of one request."""

from dataclasses import dataclass

import torch

from memsvc.device.page_view import check_req_kind, page_view
from memsvc.wire.mem import KindLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class RingShape:
    """A page: [page_rows, 2, num_heads] float32 (g, beta), then [page_rows, conv_dim] of dtype.

    The second part are the rows that enter the convolution. A ring is num_pages pages one after another;
    position p has row p % num_rows of it.
    """

    page_rows: int
    num_pages: int
    num_heads: int
    conv_dim: int
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        """Rows of a ring."""
        return self.page_rows * self.num_pages

    @property
    def gate_bytes(self) -> int:
        """Bytes of the first part."""
        return self.page_rows * 2 * self.num_heads * 4

    @property
    def page_bytes(self) -> int:
        """Bytes of both parts."""
        return self.gate_bytes + self.page_rows * self.conv_dim * self.dtype.itemsize


class RingPool:
    """The rings of one kind as views into the arena. A row is read only after the same request wrote it."""

    def __init__(self, arena: torch.Tensor, kind: KindLayout, shape: RingShape) -> None:
        """arena: uint8 [arena_bytes]. Raises ValueError if kind and shape do not describe the same page."""
        check_req_kind(arena, kind, shape.page_bytes, str(shape))
        self.kind = kind
        self.shape = shape
        self._gates = page_view(arena, kind, 0, (shape.page_rows, 2, shape.num_heads), torch.float32)
        self._raw = page_view(arena, kind, shape.gate_bytes, (shape.page_rows, shape.conv_dim), shape.dtype)

    def read(self, pages: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of rows, by page and position int64 [n]: [n, conv_dim] of dtype, and [n, 2, num_heads] float32.

        The page is number position % num_rows // page_rows of its ring.
        """
        place = pages, positions % self.shape.page_rows
        return self._raw[place], self._gates[place]

    def write(self, pages: torch.Tensor, positions: torch.Tensor, raw: torch.Tensor, gates: torch.Tensor) -> None:
        """Store rows, in the form read gives them. No two of them may have the same page and place."""
        self.write_at(pages, positions % self.shape.page_rows, raw, gates)

    def write_at(self, pages: torch.Tensor, rows: torch.Tensor, raw: torch.Tensor, gates: torch.Tensor) -> None:
        """write, by page and row of the page int64 [n]."""
        place = pages, rows
        self._raw.index_put_(place, raw)
        self._gates.index_put_(place, gates)
