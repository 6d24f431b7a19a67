"""One kind's pages of keys and values as strided views into the arena. Nothing is copied or owned here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memsvc.device.cpu.kernels import kernels_for, load
from memsvc.device.fp8 import E4M3
from memsvc.device.fp8_pages import rounded, widen
from memsvc.wire.mem import KindLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class KvShape:
    """What one page holds: [num_layers, 2 (K, V), page_size, num_kv_heads, head_dim] of dtype.

    dtype may be e4m3, whatever the model computes in: rows are rounded when they are written (fp8_pages.rounded).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, K and V."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KvPool:
    """Keys and values of one kind. A token's place is a slot: page_id * page_size + offset.

    Page p starts at byte p * kind.stride_bytes of the arena. The views address the arena with 64-bit
    offsets, so arenas above 2^31 elements are fine. Page 0 is the dummy page: rows that belong
    nowhere are written there, and whoever reads it must mask what it reads.
    """

    def __init__(self, arena: torch.Tensor, kind: KindLayout, shape: KvShape) -> None:
        """arena: uint8 [arena_bytes]. Raises ValueError if kind and shape do not describe the same page."""
        _check(arena, kind, shape)
        if shape.dtype == torch.bfloat16 and arena.is_cpu:
            load()  # so that the log of a start says which kernels run
        item = shape.dtype.itemsize
        self.kind = kind
        self.shape = shape
        self.page_size = kind.tokens_per_page
        self.num_pages = kind.num_pages
        row = shape.num_kv_heads * shape.head_dim
        half = self.page_size * row  # elements of K (or V) of one layer of one page
        stride = kind.stride_bytes // item
        flat = arena[: arena.numel() // item * item].view(shape.dtype)
        size = (self.num_pages, shape.num_layers, 2, self.page_size, shape.num_kv_heads, shape.head_dim)
        strides = (stride, 2 * half, half, row, shape.head_dim, 1)
        pages = flat.as_strided(size, strides)
        self._pages = _movable(flat.as_strided((self.num_pages, shape.num_layers * 2 * half), (stride, 1)))
        self.pages = pages
        """All of it, a view [num_pages, num_layers, 2 (K, V), page_size, num_kv_heads, head_dim]."""
        self._k = [pages[:, layer, 0] for layer in range(shape.num_layers)]
        self._v = [pages[:, layer, 1] for layer in range(shape.num_layers)]
        # K and V of a page lie on one lattice, so that one copy takes both. Its rows may overlap: they are only read.
        self._unit = math.gcd(stride, half)
        self._step, self._to_v = stride // self._unit, half // self._unit
        num_halves = (self.num_pages - 1) * self._step + self._to_v + 1
        self._halves = [
            _movable(flat[2 * layer * half :].as_strided((num_halves, half), (self._unit, 1)))
            for layer in range(shape.num_layers)
        ]

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer, a view [num_pages, page_size, num_kv_heads, head_dim]."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer, the same form."""
        return self._v[layer]

    def split(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots int64 [n] as page ids and offsets, for write_at: done once a forward, not once a layer."""
        return slots // self.page_size, slots % self.page_size

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [n, num_kv_heads, head_dim] of n tokens at slots int64 [n].

        They are of the pages' dtype, or of any if that is e4m3.
        """
        self.write_at(layer, self.split(slots), k, v)

    def write_at(self, layer: int, place: tuple[torch.Tensor, torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> None:
        """write, with the slots already split."""
        kernels = kernels_for(k)
        if kernels and kernels.write_kv((self._k[layer], self._v[layer]), place, k, v):
            return
        if self.shape.dtype == E4M3:
            for pages, rows in ((self._k[layer], k), (self._v[layer], v)):
                _movable(pages).index_put_(place, _movable(rounded(rows)))
            return
        self._k[layer].index_put_(place, k)
        self._v[layer].index_put_(place, v)

    def places(self, page_table: torch.Tensor) -> torch.Tensor:
        """Where gather_at finds the pages of page_table int64 [n, p]: once a forward, not once a layer."""
        at = page_table.reshape(-1) * self._step
        return torch.cat((at, at + self._to_v))

    def gather_at(self, layer: int, places: torch.Tensor, out: torch.Tensor) -> None:
        """Copy pages to out, contiguous [2 (K, V), n, p * page_size, num_kv_heads, head_dim], of the pages' dtype.

        Slots past a request's length hold whatever was there, NaN included.
        """
        torch.index_select(self._halves[layer], 0, places, out=_movable(out).view(len(places), -1))

    def gather_wide(self, layer: int, places: torch.Tensor, out: torch.Tensor) -> None:
        """gather_at to an out of the dtype in which the model computes."""
        if out.dtype == self.shape.dtype:
            self.gather_at(layer, places, out)
            return
        codes = torch.empty(out.shape, dtype=self.shape.dtype, device=out.device)
        self.gather_at(layer, places, codes)
        widen(codes, out)

    def rows_at(
        self, layer: int, place: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of k and v [n, num_kv_heads, head_dim] of n tokens, in dtype. place: as write_at takes it."""
        k, v = (_movable(pages)[place].view(self.shape.dtype).to(dtype) for pages in (self._k[layer], self._v[layer]))
        return k, v

    def gather(self, layer: int, page_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the pages of page_table int [n, p]: k and v, each [n, p * page_size, num_kv_heads, head_dim]."""
        n, p = page_table.shape
        form = (2, n, p * self.page_size, self.shape.num_kv_heads, self.shape.head_dim)
        out = torch.empty(form, dtype=self.shape.dtype, device=self._pages.device)
        self.gather_at(layer, self.places(page_table.long()), out)
        return out[0], out[1]

    def zero_pages(self, page_ids: Sequence[int]) -> None:
        """Clear pages in all layers: what memsvc lists as coming from another kind."""
        if page_ids:
            self.zero_pages_at(torch.tensor(list(page_ids), dtype=torch.int64, device=self._pages.device))

    def zero_pages_at(self, page_ids: torch.Tensor) -> None:
        """The same with ids int64 [n] that lie on the device, for which nobody has to wait."""
        self._pages.index_fill_(0, page_ids, 0)


def _movable(x: torch.Tensor) -> torch.Tensor:
    """x for copies: torch moves e4m3 as bytes only."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


def zero_rows(gathered: torch.Tensor, rows: torch.Tensor) -> None:
    """Zero rows int64 [m] of gathered [2, n, length, kv_heads, d], counted over all: places that hold no token."""
    flat = gathered.view(-1, gathered.shape[-2] * gathered.shape[-1])
    if flat.shape[1] * flat.element_size() % 8 == 0:
        flat = flat.view(torch.int64)  # zero is zero in eight bytes at a time as well, and quicker
    _movable(flat).index_fill_(0, rows, 0)


def _check(arena: torch.Tensor, kind: KindLayout, shape: KvShape) -> None:
    if arena.dtype != torch.uint8 or arena.dim() != 1:
        raise ValueError(f"the arena must be uint8 [bytes], got {arena.dtype} {list(arena.shape)}")
    if kind.tokens_per_page <= 0:
        raise ValueError(f"kind {kind.name} holds no tokens (tokens_per_page {kind.tokens_per_page})")
    want = shape.token_bytes * kind.tokens_per_page
    if kind.page_bytes != want:
        raise ValueError(
            f"kind {kind.name} has pages of {kind.page_bytes} bytes, but {kind.tokens_per_page} tokens of "
            f"{shape.num_layers} layers x 2 x {shape.num_kv_heads} heads x {shape.head_dim} x {shape.dtype} need {want}"
        )
    item = shape.dtype.itemsize
    if kind.stride_bytes < kind.page_bytes or kind.stride_bytes % item:
        raise ValueError(
            f"kind {kind.name} has a page stride of {kind.stride_bytes} bytes: less than a page of "
            f"{kind.page_bytes}, or not a multiple of {item}"
        )
    end = (kind.num_pages - 1) * kind.stride_bytes + kind.page_bytes
    if kind.num_pages < 1 or end > arena.numel():
        raise ValueError(f"kind {kind.name}: {kind.num_pages} pages end at byte {end}, the arena has {arena.numel()}")
