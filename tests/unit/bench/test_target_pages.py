"""Pages of a bench's target: all kinds in one arena, no two requests in one page, no two kinds in one frame."""

import numpy as np
import pytest

from target_worker.model.config import RING, STATE, TARGET_KV, TargetShape, kind_specs
from tests.bench.ladder_geometry import LADDERS
from tests.bench.target_pages import PAGE_SIZE, Wanted, lay_out

EXCHANGE_BYTES = 600_000_000


@pytest.mark.parametrize("geometry", ["qwen3-8b-dflash", "qwen38-27b-dflash2", "tiny-hybrid"])
def test_pages_are_nobody_elses(geometry: str):
    shape = TargetShape.from_json(LADDERS[geometry].target, {})
    kinds, is_hybrid = kind_specs(shape, PAGE_SIZE, "auto", 9), shape.linear is not None
    wanted = {slot: Wanted(num_tokens=100 + slot, writes_states=is_hybrid and slot % 4 == 0) for slot in range(1, 9)}
    layout, pages = lay_out(kinds, wanted, EXCHANGE_BYTES, np.random.default_rng(0))
    per_frame = {kind.name: kind.pages_per_frame for kind in layout.kinds}
    taken = [
        (kind, page)
        for own in pages.values()
        for kind, some in ((TARGET_KV, own.kv), (STATE, {*own.states, *own.states_read}), (RING, own.rings))
        for page in some
    ]
    assert len(set(taken)) == len(taken)
    frames = {page // per_frame[kind]: kind for kind, page in taken}
    assert len(frames) == len({(page // per_frame[kind], kind) for kind, page in taken}), "one kind a frame"
    # The dummy frame comes first, then the exchange.
    assert min(frames) * layout.frame_bytes >= layout.exchange_offset + EXCHANGE_BYTES
    assert max(frames) < layout.num_frames
    assert len(frames) == layout.num_frames - min(frames), "and no more than that"
    for slot, own in pages.items():
        assert len(own.kv) == -(-(100 + slot) // PAGE_SIZE)
        assert len(own.states) == len(own.states_read) == shape.num_linear_layers
        assert (own.states == own.states_read) == (not wanted[slot].writes_states)
