"""Writes the target's features of newly final tokens into draft KV, for exactly the rows named."""

from dataclasses import dataclass

import numpy as np
import torch

from draft_worker.model import DraftModel
from memsvc.device.kv_pool import KvPool
from memsvc.device.page_table import PageTables


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureWrites:
    """Runs of tokens, in columns: tokens [starts, starts + lens) of a request lie in exchange rows from `first`."""

    rows: np.ndarray
    """int64 [w]: row in the page tables."""
    starts: np.ndarray
    """int64 [w]: position of the first token."""
    lens: np.ndarray
    """int64 [w]: number of tokens."""
    first: np.ndarray
    """int64 [w]: exchange row of the first token."""

    @property
    def num_tokens(self) -> int:
        """All runs together."""
        return int(self.lens.sum())


def exchange_rows(arena: torch.Tensor, offset: int, num_bytes: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The exchange region as feature rows [rows, width] of dtype, as many as fit. A view of the arena."""
    row_bytes = width * dtype.itemsize
    num_rows = num_bytes // row_bytes
    return arena[offset : offset + num_rows * row_bytes].view(dtype).view(num_rows, width)


def write_features(
    model: DraftModel, pool: KvPool, tables: PageTables, exchange: torch.Tensor, writes: FeatureWrites
) -> None:
    """K and V of all layers for the tokens of `writes`, at their slots. Nothing else in the pool changes."""
    if not writes.num_tokens:
        return
    # Token i of run r stands at starts[r] + i and its features at first[r] + i.
    run = np.repeat(np.arange(len(writes.lens)), writes.lens)
    step = np.arange(writes.num_tokens) - np.repeat(np.cumsum(writes.lens) - writes.lens, writes.lens)
    positions = writes.starts[run] + step
    features = exchange[torch.from_numpy(writes.first[run] + step).to(exchange.device)]
    k, v = model.context(features, torch.from_numpy(positions).to(exchange.device))
    place = pool.split(tables.slots_at(writes.rows[run], positions))
    for layer in range(model.shape.num_layers):
        pool.write_at(layer, place, k[:, layer], v[:, layer])
