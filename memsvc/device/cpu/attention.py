"""What the attention kernel is told: which rows of the batch see which keys, and where all of it lies."""

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import torch

from memsvc.device.cpu.calls import AttentionCall
from memsvc.device.kv_pool import KvPool
from memsvc.device.page_table import PageTables

MAX_HEAD_DIM = 256
BLOCK_ROWS = 16
"""Rows, counted over the heads of a key-value head, that share a pass over the keys."""
SERIAL_WORK = 1 << 16
"""Products of a row and a key below which a second thread costs more than it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of n requests, int64 [n] each."""

    table_rows: np.ndarray
    firsts: np.ndarray
    """Where a request's rows start in q: they are consecutive."""
    nums: np.ndarray
    """How many it has."""
    lows: np.ndarray
    """No row sees keys before this position."""
    positions: np.ndarray
    """Of its first row."""


def takes(pool: KvPool) -> bool:
    """The kernel knows pages of this kind. It reads them in the dtype of the rows, so it knows none in 8 bits."""
    shape = pool.shape
    return shape.dtype.itemsize > 1 and shape.head_dim % 16 == 0 and shape.head_dim <= MAX_HEAD_DIM


def row_blocks(rows: Rows, group_size: int) -> np.ndarray:
    """Block of attention.h, int64 [m, 7]: each request's rows in equal parts of at most BLOCK_ROWS, whole quads."""
    quads = -(-rows.nums * group_size // 4)
    parts = -(-quads * 4 // BLOCK_ROWS)
    part_rows = -(-quads // parts) * 4
    owner = np.repeat(np.arange(len(parts)), parts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    start = place * part_rows[owner]
    end = np.minimum(start + part_rows[owner], rows.nums[owner] * group_size)
    columns = (rows.table_rows, rows.firsts, rows.nums, rows.lows, rows.positions)
    blocks = np.stack([*(column[owner] for column in columns), start, end], axis=1)
    return np.ascontiguousarray(blocks[start < end])


class KernelPlan:
    """One forward's attention of some rows, for all layers of one kind."""

    def __init__(
        self, pool: KvPool, tables: PageTables, rows: Rows, num_heads: int, *, causal: bool = True, window: int = 0
    ) -> None:
        """window: a row sees so many positions back, itself included (0: all), and as far ahead if not causal."""
        shape = pool.shape
        self._pool = pool
        self._table = tables.table
        self._blocks = row_blocks(rows, num_heads // shape.num_kv_heads)
        self._kept: tuple[torch.Tensor | None, ...] = ()
        work = int(((rows.positions + rows.nums) * rows.nums).sum()) * num_heads
        self._call = AttentionCall(
            table=self._table.data_ptr(), blocks=self._blocks.ctypes.data, num_blocks=len(self._blocks),
            num_threads=1 if work < SERIAL_WORK else torch.get_num_threads(),
            page_stride=pool.k(0).stride(0), table_stride=self._table.stride(0),
            num_pages=pool.num_pages, page_size=pool.page_size,
            num_kv_heads=shape.num_kv_heads, group_size=num_heads // shape.num_kv_heads, head_dim=shape.head_dim,
            is_causal=causal, window=window, scale=1 / math.sqrt(shape.head_dim),
        )  # fmt: skip

    def at(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> ctypes.Structure:
        """The call for one layer whose pages hold the rows' own keys too.

        q and out: rows of contiguous heads [..., heads, d] at one stride each; valid until the next layer's.
        """
        call = self._call
        call.q, call.q_stride = q.data_ptr(), _row_stride(q)
        call.out, call.out_stride = out.data_ptr(), _row_stride(out)
        call.k_pages, call.v_pages = self._pool.k(layer).data_ptr(), self._pool.v(layer).data_ptr()
        return call

    def with_own(
        self, call: ctypes.Structure, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> ctypes.Structure:
        """The same call for rows whose own keys and values are no page's yet: k and v [..., kv_heads, d].

        sink [heads]: a logit per head that takes weight to nothing.
        """
        sink = None if sink is None else sink.float().contiguous()
        self._kept = (k, v, sink)
        call.own_k, call.own_k_stride = k.data_ptr(), _row_stride(k)
        call.own_v, call.own_v_stride = v.data_ptr(), _row_stride(v)
        call.sink = None if sink is None else sink.data_ptr()
        return call


def _row_stride(x: torch.Tensor) -> int:
    """Elements from a row of x [..., heads, d] to the next."""
    assert x.stride()[-2:] == (x.shape[-1], 1), f"heads of a row lie apart: {list(x.shape)} at {x.stride()}"
    assert x.dim() == 3 or x.stride(0) == x.shape[1] * x.stride(1), f"rows lie apart: {list(x.shape)} at {x.stride()}"
    return x.stride(-3)
