"""Recurrent states in pages: one page is the state of one linear layer of one request."""

from dataclasses import dataclass

import torch

from memsvc.device.page_view import check_req_kind, page_view
from memsvc.wire.mem import KindLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShape:
    """A page: [num_heads, k_dim, v_dim] of recurrent_dtype, then the last conv_rows inputs of the convolution.

    These are [conv_rows, conv_dim] of dtype, oldest first; conv_rows is the kernel's size less one.
    """

    num_heads: int
    k_dim: int
    v_dim: int
    conv_rows: int
    conv_dim: int
    dtype: torch.dtype
    recurrent_dtype: torch.dtype = torch.float32
    """Of what is kept; arithmetic is float32."""

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of the first part."""
        return self.num_heads * self.k_dim * self.v_dim * self.recurrent_dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of both parts."""
        return self.recurrent_bytes + self.conv_rows * self.conv_dim * self.dtype.itemsize


class StatePool:
    """The states of one kind as views into the arena. Page 0 is the dummy page: never read unmasked."""

    def __init__(self, arena: torch.Tensor, kind: KindLayout, shape: StateShape) -> None:
        """arena: uint8 [arena_bytes]. Raises ValueError if kind and shape do not describe the same page."""
        check_req_kind(arena, kind, shape.page_bytes, str(shape))
        self.kind = kind
        self.shape = shape
        size = (shape.num_heads * shape.k_dim * shape.v_dim,)
        self._recurrent = page_view(arena, kind, 0, size, shape.recurrent_dtype)
        conv = (shape.conv_rows * shape.conv_dim,)
        self._conv = page_view(arena, kind, shape.recurrent_bytes, conv, shape.dtype)

    @property
    def device(self) -> torch.device:
        """Where the states are."""
        return self._recurrent.device

    def read(self, pages: torch.Tensor, empty: torch.Tensor | None = None) -> torch.Tensor:
        """Copies [n, num_heads, k_dim, v_dim] float32 of the states in pages int64 [n].

        Page 0 reads as zeros, which is the state before the first token; so it does in read_conv. empty: int64, the
        places that are to read so, from whoever knows them: on a device the host waits for the pages otherwise.
        """
        found = _copies(self._recurrent, pages, empty).float()
        return found.view(-1, self.shape.num_heads, self.shape.k_dim, self.shape.v_dim)

    def read_conv(self, pages: torch.Tensor) -> torch.Tensor:
        """Copies [n, conv_rows, conv_dim] of the inputs of the convolution."""
        return _copies(self._conv, pages).view(-1, self.shape.conv_rows, self.shape.conv_dim)

    def write(self, pages: torch.Tensor, recurrent: torch.Tensor, conv: torch.Tensor) -> None:
        """Store states, in the form that read and read_conv give them, in pages int64 [n], all different."""
        self._recurrent.index_copy_(0, pages, recurrent.flatten(1).to(self.shape.recurrent_dtype))
        self._conv.index_copy_(0, pages, conv.flatten(1))


def _copies(rows: torch.Tensor, pages: torch.Tensor, empty: torch.Tensor | None = None) -> torch.Tensor:
    zeros = (pages == 0).nonzero()[:, 0] if empty is None else empty
    found = rows.index_select(0, pages)
    # A fill, since what lies in the dummy page may be NaN, which no product clears.
    return found.index_fill_(0, zeros, 0) if len(zeros) else found
