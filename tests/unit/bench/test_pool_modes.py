"""What each mode makes of the same bytes."""

import pytest

from memsvc.core.geometry import solve
from tests.bench.pool_modes import (
    GIB,
    MODES,
    PADDED_BYTES,
    PADDED_PAGE_SIZE,
    RING_BYTES,
    STATE_BYTES,
    STATE_LAYERS,
    TARGET_TOKEN_BYTES,
    make_mode,
)

STATE = STATE_LAYERS * STATE_BYTES
RING = STATE_LAYERS * RING_BYTES


def test_the_geometry_is_the_27b_one():
    assert (STATE_BYTES, RING_BYTES) == (3_207_168, 709_376)
    kinds = make_mode("unified", GIB * 20).config.kinds
    assert [kind.page_bytes for kind in kinds] == [16 * (64 << 10), 16 * (20 << 10), STATE_BYTES, RING_BYTES // 2]
    assert [kind.pages_per_req for kind in kinds] == [0, 0, 48, 96]
    assert [kind.window for kind in kinds] == [0, 2048, 0, 0]


def per_request_bytes(mode: str) -> int:
    kinds = make_mode(mode, 20 * GIB).config.kinds
    return sum(kind.pages_per_req * kind.page_bytes for kind in kinds)


def test_only_the_scratch_modes_grow_with_the_number_of_drafts():
    assert per_request_bytes("unified") == STATE + RING
    assert per_request_bytes("padded") == 9 * STATE_LAYERS * PADDED_BYTES
    assert per_request_bytes("padded-ring") == (STATE_LAYERS + 12) * PADDED_BYTES
    assert make_mode("static-scratch", 20 * GIB, 1.0).state_run_bytes == 10 * STATE
    assert make_mode("static-ring", 20 * GIB, 1.0).state_run_bytes == STATE + RING


@pytest.mark.parametrize("ratio", [0.25, 0.9, 4.0])
def test_a_split_gives_states_their_share_and_tokens_the_rest(ratio: float):
    mode = make_mode("static-ring", 20 * GIB, ratio)
    assert mode.state_pool_bytes == int(20 * GIB * ratio / (1 + ratio))
    assert mode.config.arena_bytes + mode.state_pool_bytes == 20 * GIB
    assert [kind.name for kind in mode.config.kinds] == ["target_kv", "draft_kv"]


@pytest.mark.parametrize("name", ["padded", "padded-ring"])
def test_padded_pages_are_all_of_one_size_and_hold_what_they_say(name: str):
    mode = make_mode(name, 20 * GIB)
    assert {kind.page_bytes for kind in mode.config.kinds} == {PADDED_BYTES}
    assert len(set(solve(mode.config.kinds).pages_per_frame)) == 1
    assert PADDED_BYTES == PADDED_PAGE_SIZE * TARGET_TOKEN_BYTES
    assert 0 <= PADDED_BYTES - STATE_BYTES < TARGET_TOKEN_BYTES
    assert all(0 < content <= PADDED_BYTES for content in mode.content_bytes)


def test_every_mode_uses_the_same_memory():
    for name in MODES:
        mode = make_mode(name, 20 * GIB, 0.5)
        assert mode.config.arena_bytes + mode.state_pool_bytes == 20 * GIB
