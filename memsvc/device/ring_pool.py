"""Replay rings in pages: one page holds the newest raw inputs of one linear layer of one request."""

from dataclasses import dataclass

import torch

from memsvc.device.page_view import check_req_kind, page_view
from memsvc.wire.mem import KindLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class RingShape:
    """A page: [num_rows, 2, num_heads] float32 (g, beta), then [num_rows, conv_dim] of dtype.

    The second part are the rows that enter the convolution. Position p has row p % num_rows.
    """

    num_rows: int
    num_heads: int
    conv_dim: int
    dtype: torch.dtype

    @property
    def gate_bytes(self) -> int:
        """Bytes of the first part."""
        return self.num_rows * 2 * self.num_heads * 4

    @property
    def page_bytes(self) -> int:
        """Bytes of both parts."""
        return self.gate_bytes + self.num_rows * self.conv_dim * self.dtype.itemsize


class RingPool:
    """The rings of one kind as views into the arena. A row is read only after the same request wrote it."""

    def __init__(self, arena: torch.Tensor, kind: KindLayout, shape: RingShape) -> None:
        """arena: uint8 [arena_bytes]. Raises ValueError if kind and shape do not describe the same page."""
        check_req_kind(arena, kind, shape.page_bytes, str(shape))
        self.kind = kind
        self.shape = shape
        self._gates = page_view(arena, kind, 0, (shape.num_rows, 2, shape.num_heads), torch.float32)
        self._raw = page_view(arena, kind, shape.gate_bytes, (shape.num_rows, shape.conv_dim), shape.dtype)

    def read(self, pages: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of rows, by page and position int64 [n]: [n, conv_dim] of dtype, and [n, 2, num_heads] float32."""
        place = pages, positions % self.shape.num_rows
        return self._raw[place], self._gates[place]

    def write(self, pages: torch.Tensor, positions: torch.Tensor, raw: torch.Tensor, gates: torch.Tensor) -> None:
        """Store rows, in the form read gives them. No two of them may have the same page and place."""
        place = pages, positions % self.shape.num_rows
        self._raw.index_put_(place, raw)
        self._gates.index_put_(place, gates)
