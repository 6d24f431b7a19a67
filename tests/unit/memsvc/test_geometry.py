"""The geometry solver and the layout made from it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsvc.core.config import PoolConfig
from memsvc.core.geometry import (
    ALIGN,
    MAX_PAGE_ID,
    Geometry,
    exchange_frames,
    fixed_frames,
    make_layout,
    plan_lines,
    requests_that_fit,
    smallest_arena,
    solve,
)
from memsvc.wire.mem import KindSpec
from tests.support import hypothesis_profiles
from tests.support.mem_builders import DRAFT, FRAME_BYTES, RING, STATE, TARGET, make_config, windowed

PROFILE = hypothesis_profiles.load()
MIB = 1 << 20
HYBRID_27B = [
    KindSpec("target_kv", MIB, 16),
    KindSpec("draft_kv", 320 * 1024, 16),
    KindSpec("state", 3_207_168, 0, 48),
    KindSpec("ring", 720_000, 0, 48),
]


def kinds_strategy() -> st.SearchStrategy[list[KindSpec]]:
    sizes = st.lists(st.integers(1, 1 << 22), min_size=1, max_size=4)
    return sizes.map(
        lambda pages: [
            KindSpec(f"k{i}", size, 16 if i < 2 else 0, 0 if i < 2 else 1 + i) for i, size in enumerate(pages)
        ]
    )


def test_hybrid_27b_wastes_two_percent_as_in_the_design() -> None:
    geometry = solve(HYBRID_27B[:3])
    assert geometry.pages_per_frame == (3, 9, 1)
    assert geometry.frame_bytes == 3_207_168
    assert geometry.waste[0] == pytest.approx(0.02, abs=0.001)


def test_kinds_that_divide_each_other_waste_nothing() -> None:
    geometry = solve([KindSpec("t", 737_280, 16), KindSpec("d", 73_728, 16)])
    assert geometry.pages_per_frame == (1, 10)
    assert geometry.waste == (0.0, 0.0)


def test_one_kind_gets_frames_of_one_page() -> None:
    assert solve([KindSpec("t", 4096, 16)]) == Geometry(frame_bytes=4096, pages_per_frame=(1,), waste=(0.0,))


@PROFILE
@given(kinds=kinds_strategy())
def test_every_page_starts_on_its_own_lattice_point(kinds: list[KindSpec]) -> None:
    geometry = solve(kinds)
    for index, kind in enumerate(kinds):
        stride = geometry.stride_bytes(index)
        assert stride * geometry.pages_per_frame[index] == geometry.frame_bytes
        assert stride % ALIGN == 0
        assert stride >= kind.page_bytes
        waste = 1 - geometry.pages_per_frame[index] * kind.page_bytes / geometry.frame_bytes
        assert math.isclose(geometry.waste[index], waste)


def test_layout_of_the_design_kinds_with_exchange() -> None:
    config = PoolConfig(arena_bytes=2 << 30, page_size=16, kinds=HYBRID_27B, exchange_bytes=30 * MIB)
    geometry = solve(config.kinds)
    layout = make_layout(config, geometry)
    assert layout.num_frames == (2 << 30) // geometry.frame_bytes
    assert layout.exchange_offset == geometry.frame_bytes
    assert exchange_frames(config, geometry.frame_bytes) == -(-30 * MIB // geometry.frame_bytes)
    for kind, per_frame in zip(layout.kinds, geometry.pages_per_frame, strict=True):
        assert kind.num_pages == layout.num_frames * per_frame
        assert (kind.num_pages - 1) * kind.stride_bytes + kind.page_bytes <= layout.arena_bytes


def test_shared_weights_lie_right_after_the_exchange() -> None:
    geometry = solve(HYBRID_27B)
    frame_bytes = geometry.frame_bytes
    exchange_bytes, shared_bytes = 3 * frame_bytes - 1, 7 * frame_bytes + 1
    config = PoolConfig(
        arena_bytes=2 << 30, page_size=16, kinds=HYBRID_27B, exchange_bytes=exchange_bytes, shared_bytes=shared_bytes
    )
    layout = make_layout(config, geometry)
    assert (layout.exchange_offset, layout.shared_offset) == (frame_bytes, 4 * frame_bytes)
    assert layout.shared_bytes == shared_bytes
    assert fixed_frames(config, frame_bytes) == 1 + 3 + 8
    without = PoolConfig(arena_bytes=2 << 30, page_size=16, kinds=HYBRID_27B, exchange_bytes=exchange_bytes)
    assert smallest_arena(config, geometry) - smallest_arena(without, geometry) == 8 * frame_bytes
    lines, plain = (plan_lines(each, geometry, make_layout(each, geometry)) for each in (config, without))
    assert "1 dummy, 3 exchange, 8 shared weights, 0 for pins," in lines[0]
    assert "1 dummy, 3 exchange, 0 for pins," in plain[0]
    usable, more = (int(each[0].split(" for pins, ")[1].split(" ")[0]) for each in (lines, plain))
    assert more - usable == 8


def test_small_arena_is_refused_with_the_size_that_works() -> None:
    with pytest.raises(ValueError, match="smallest that works is") as refusal:
        make_layout(make_config(3, [TARGET, DRAFT, STATE, RING]), solve([TARGET, DRAFT, STATE, RING]))
    smallest = int(str(refusal.value).split("works is ")[1].split(" ")[0])
    config = make_config(smallest // FRAME_BYTES, [TARGET, DRAFT, STATE, RING])
    assert make_layout(config, solve(config.kinds)).num_frames == smallest // FRAME_BYTES
    with pytest.raises(ValueError, match="too small"):
        make_layout(make_config(smallest // FRAME_BYTES - 1, [TARGET, DRAFT, STATE, RING]), solve(config.kinds))


def test_page_ids_past_31_bits_are_refused_with_the_limit() -> None:
    config = PoolConfig(arena_bytes=(MAX_PAGE_ID + 1) * 256, page_size=16, kinds=[KindSpec("t", 256, 16)])
    with pytest.raises(ValueError, match=str(MAX_PAGE_ID)):
        make_layout(config, solve(config.kinds))


def test_plan_names_every_kind_and_how_many_requests_fit() -> None:
    config = PoolConfig(arena_bytes=40 << 30, page_size=16, kinds=HYBRID_27B, exchange_bytes=30 * MIB)
    geometry = solve(config.kinds)
    lines = plan_lines(config, geometry, make_layout(config, geometry))
    text = "\n".join(lines)
    for kind in HYBRID_27B:
        assert f"kind {kind.name}: {kind.page_bytes} bytes a page" in text
    usable = int(lines[0].split(" for pins, ")[1].split(" ")[0])
    fits = {int(part.split("k: ")[0]): int(part.split("k: ")[1]) for part in lines[-1].split("tokens: ")[1].split(", ")}
    for thousands, num in fits.items():
        # Of the 64 slots that each has beyond its tokens.
        pages = [thousands * 64 + 4, thousands * 64 + 4, 48, 48]
        assert geometry.frames_for([num * each for each in pages]) <= usable
        assert geometry.frames_for([(num + 1) * each for each in pages]) > usable


def test_slots_ahead_of_a_window_are_counted_too() -> None:
    geometry = solve([TARGET, windowed(DRAFT, 8)])
    layout = make_layout(make_config(400, [TARGET, windowed(DRAFT, 8)]), geometry)
    target, draft = (kind.pages_per_frame for kind in layout.kinds)
    page = layout.page_size
    for slack in (0, 1, page, 5 * page):
        pages = -(-(1024 + slack) // page), -(-(8 + slack) // page) + 1
        usable = -(-3 * pages[0] // target) - (-3 * pages[1] // draft)
        assert requests_that_fit(layout, 1024, usable, slack) == 3
        assert requests_that_fit(layout, 1024, usable - 1, slack) == 2


def test_a_window_lets_more_long_requests_fit() -> None:
    plain, narrow = make_config(400), make_config(400, [TARGET, windowed(DRAFT, 8)])

    def long_ones(config: PoolConfig) -> int:
        geometry = solve(config.kinds)
        return int(plan_lines(config, geometry, make_layout(config, geometry))[-1].split("1k: ")[1].split(",")[0])

    assert long_ones(narrow) == 1
    assert long_ones(plain) == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"eviction_policy": "fifo"}, "eviction_policy is 'fifo'"),
        ({"high_watermark": 1.5}, "high_watermark"),
        ({"lease_ms": -1}, "lease_ms is -1"),
        ({"shared_bytes": -1}, "shared_bytes is -1"),
        ({"kinds": [KindSpec("s", 256, 0, 1)]}, "no token kind"),
        ({"kinds": [KindSpec("t", 256, 4)]}, "tokens_per_page is 4, must be 0 or 2"),
        ({"kinds": [KindSpec("t", 256, 2, 1)]}, "only per-request kinds"),
        ({"kinds": [KindSpec("t", 256, 2), KindSpec("t", 256, 2)]}, "names repeat"),
        ({"kinds": [KindSpec("t", 256, 2, 0, 8)]}, "cannot have a window"),
        ({"kinds": [KindSpec("t", 0, 2)]}, "page_bytes is 0"),
    ],
)
def test_nonsense_is_refused_with_its_value(changes: dict, text: str) -> None:
    fields = {"arena_bytes": 1 << 20, "page_size": 2, "kinds": [TARGET], **changes}
    with pytest.raises(ValueError, match=text):
        PoolConfig(**fields)
