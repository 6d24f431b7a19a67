"""Draft KV of prompt chunks: any number of rows, whose places the host knows."""

import numpy as np
import torch

from draft_worker.cuda.network import DraftMemory
from draft_worker.features import FeatureWrites
from draft_worker.model import DraftModel
from memsvc.device.lane import Lane
from memsvc.device.page_table import PageTables

PIECE_ROWS = 2048
"""Rows projected at a time: their projections take 40 KB each at 27B geometry."""


def write_prompt_features(
    model: DraftModel, memory: DraftMemory, tables: PageTables, lane: Lane, writes: FeatureWrites
) -> None:
    """K and V of all layers for the tokens of `writes`, at their slots by the host's tables, on the current stream."""
    rows = np.repeat(writes.rows, writes.lens)
    step = np.arange(writes.num_tokens) - np.repeat(np.cumsum(writes.lens) - writes.lens, writes.lens)
    positions = np.repeat(writes.starts, writes.lens) + step
    pages = tables.table.numpy()[rows, positions // tables.page_size].astype(np.int64)
    places = np.stack(
        (np.repeat(writes.first, writes.lens) + step, positions, pages, positions % tables.page_size)
    ).astype(np.int64)
    for start in range(0, writes.num_tokens, PIECE_ROWS):
        _write(model, memory, lane.stage(np.ascontiguousarray(places[:, start : start + PIECE_ROWS])))


def _write(model: DraftModel, memory: DraftMemory, places: torch.Tensor) -> None:
    """places int64 [4, n] on the device: exchange rows, positions, pages, offsets."""
    rows, positions, pages, offsets = places
    k, v = model.context(memory.features.index_select(0, rows), positions)
    for layer in range(model.shape.num_layers):
        memory.pool.write_at(layer, (pages, offsets), k[:, layer], v[:, layer])
