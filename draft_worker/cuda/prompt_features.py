"""Draft KV of prompt chunks: any number of rows, whose places the host knows."""

import numpy as np

from draft_worker.config import PIECE_ROWS
from draft_worker.cuda.context import write_features
from draft_worker.cuda.network import DraftMemory
from draft_worker.features import FeatureWrites
from draft_worker.model import DraftModel
from memsvc.device.kernels.places import TokenRows
from memsvc.device.lane import Lane
from memsvc.device.page_table import PageTables


def write_prompt_features(
    model: DraftModel, memory: DraftMemory, tables: PageTables, lane: Lane, writes: FeatureWrites
) -> None:
    """K and V of all layers for the tokens of `writes`, at their slots by the host's tables, on the current stream."""
    rows = np.repeat(writes.rows, writes.lens)
    step = np.arange(writes.num_tokens) - np.repeat(np.cumsum(writes.lens) - writes.lens, writes.lens)
    positions = np.repeat(writes.starts, writes.lens) + step
    slots = tables.host_slots_at(rows, positions)
    places = np.stack((np.repeat(writes.first, writes.lens) + step, positions, slots)).astype(np.int64)
    for start in range(0, writes.num_tokens, PIECE_ROWS):
        piece = np.ascontiguousarray(places[:, start : start + PIECE_ROWS])
        exchange_rows, on_device = piece[0], lane.stage(piece)
        first, num = int(exchange_rows[0]), len(exchange_rows)
        # Chunks of one step lie one after another: what would be copied can be read where it is.
        is_run = np.array_equal(exchange_rows, np.arange(first, first + num))
        features = memory.features[first : first + num] if is_run else memory.features.index_select(0, on_device[0])
        write_features(model, memory.pool, features, TokenRows(positions=on_device[1], slots=on_device[2]))
