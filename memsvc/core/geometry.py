"""How an arena is cut: frame size, pages per frame, and the layout workers map. Pure functions."""

import math
from dataclasses import dataclass

from memsvc.core.config import PoolConfig
from memsvc.wire.mem import KindLayout, KindSpec, Layout

ALIGN = 256
"""Every page starts on a multiple of this many bytes, as the device's loads want it."""
MAX_PAGE_ID = 2**31 - 1
MAX_FRAME_PER_PAGE = 2
"""Frames are at most so many of the largest page: larger ones save little and are pinned more often."""
MAX_CANDIDATES = 4096
REFERENCE_TOKENS = 4096
"""Waste is weighed by what a request of this length holds of each kind."""
GOOD_ENOUGH = 0.01
"""Among frame sizes within this share of the least waste the smallest is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """A frame and how each kind cuts it."""

    frame_bytes: int
    pages_per_frame: tuple[int, ...]
    """One entry per kind; frame_bytes is a multiple of each times 256."""
    waste: tuple[float, ...]
    """Per kind, the share of its frames that holds no page bytes."""

    def stride_bytes(self, kind: int) -> int:
        """Bytes from one page of the kind to the next."""
        return self.frame_bytes // self.pages_per_frame[kind]

    def frames_for(self, num_pages: list[int]) -> int:
        """Frames that hold this many pages of each kind, nothing shared between kinds."""
        return sum(-(-pages // per) for pages, per in zip(num_pages, self.pages_per_frame, strict=True))


def solve(kinds: list[KindSpec]) -> Geometry:
    """The frame that wastes least over all kinds, weighed by the bytes a typical request holds of each."""
    largest = max(kind.page_bytes for kind in kinds)
    weights = [_reference_bytes(kind) for kind in kinds]
    bases = {base for kind in kinds for base in _multiples(kind.page_bytes, largest)}
    frames = [_cut(kinds, base) for base in sorted(bases)]

    def score(frame: Geometry) -> float:
        return sum(w * waste for w, waste in zip(weights, frame.waste, strict=True)) / sum(weights)

    least = min(score(frame) for frame in frames)
    return min((f for f in frames if score(f) <= least + GOOD_ENOUGH), key=lambda f: (f.frame_bytes, score(f)))


def _reference_bytes(kind: KindSpec) -> int:
    if not kind.tokens_per_page:
        return kind.pages_per_req * kind.page_bytes
    tokens = min(REFERENCE_TOKENS, kind.window or REFERENCE_TOKENS)
    return -(-tokens // kind.tokens_per_page) * kind.page_bytes


def _multiples(page_bytes: int, largest: int) -> range:
    """Frame sizes made of whole pages of one kind that hold at least one page of every kind."""
    page = _round_up(page_bytes, ALIGN)
    first = -(-largest // page)
    last = max(first, MAX_FRAME_PER_PAGE * _round_up(largest, ALIGN) // page)
    stride = -(-(last - first + 1) // MAX_CANDIDATES)
    return range(first * page, last * page + 1, stride * page)


def _cut(kinds: list[KindSpec], base_bytes: int) -> Geometry:
    """base_bytes cut for every kind and rounded up to the lattice that all cuts share."""
    pages = [_round_up(kind.page_bytes, ALIGN) for kind in kinds]
    per_frame = tuple(base_bytes // page for page in pages)
    least = max(n * page for n, page in zip(per_frame, pages, strict=True))
    frame_bytes = _round_up(least, ALIGN * math.lcm(*per_frame))
    waste = tuple(1 - n * kind.page_bytes / frame_bytes for n, kind in zip(per_frame, kinds, strict=True))
    return Geometry(frame_bytes=frame_bytes, pages_per_frame=per_frame, waste=waste)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def exchange_frames(config: PoolConfig, frame_bytes: int) -> int:
    """Frames the exchange takes, right after the dummy frame."""
    return -(-config.exchange_bytes // frame_bytes)


def shared_frames(config: PoolConfig, frame_bytes: int) -> int:
    """Frames the shared weights take, right after the exchange."""
    return -(-config.shared_bytes // frame_bytes)


def fixed_frames(config: PoolConfig, frame_bytes: int) -> int:
    """Frames at the start of the arena that no kind can have: dummy, exchange and shared weights."""
    return 1 + exchange_frames(config, frame_bytes) + shared_frames(config, frame_bytes)


def make_layout(config: PoolConfig, geometry: Geometry) -> Layout:
    """The arena as workers map it. Raises ValueError, naming the smallest arena that works, if it is too small."""
    frame_bytes = geometry.frame_bytes
    num_frames = config.arena_bytes // frame_bytes
    smallest = smallest_arena(config, geometry)
    if config.arena_bytes < smallest:
        raise ValueError(
            f"arena of {config.arena_bytes} bytes is too small: the smallest that works is {smallest} bytes "
            f"({smallest // frame_bytes} frames of {frame_bytes} bytes)"
        )
    for kind, per_frame in zip(config.kinds, geometry.pages_per_frame, strict=True):
        if num_frames * per_frame > MAX_PAGE_ID:
            raise ValueError(
                f"kind {kind.name}: {num_frames} frames of {per_frame} pages pass the largest page id {MAX_PAGE_ID}; "
                f"use larger pages or an arena below {MAX_PAGE_ID // per_frame * frame_bytes} bytes"
            )
    return Layout(
        arena_bytes=config.arena_bytes,
        frame_bytes=frame_bytes,
        num_frames=num_frames,
        page_size=config.page_size,
        kinds=[_kind_layout(config.kinds[i], geometry, i, num_frames) for i in range(len(config.kinds))],
        exchange_offset=frame_bytes,
        exchange_bytes=config.exchange_bytes,
        shared_offset=frame_bytes * (1 + exchange_frames(config, frame_bytes)),
        shared_bytes=config.shared_bytes,
    )


def _kind_layout(kind: KindSpec, geometry: Geometry, index: int, num_frames: int) -> KindLayout:
    per_frame = geometry.pages_per_frame[index]
    return KindLayout(
        name=kind.name,
        page_bytes=kind.page_bytes,
        tokens_per_page=kind.tokens_per_page,
        pages_per_req=kind.pages_per_req,
        window=kind.window,
        pages_per_frame=per_frame,
        stride_bytes=geometry.stride_bytes(index),
        num_pages=num_frames * per_frame,
        is_state=kind.is_state,
    )


def smallest_arena(config: PoolConfig, geometry: Geometry) -> int:
    """Bytes for the fixed frames, the pin budget and one request of a single prompt page."""
    tokens = config.page_size + config.slack_tokens
    pages = [kind.pages_per_req or -(-tokens // config.page_size) for kind in config.kinds]
    frames = fixed_frames(config, geometry.frame_bytes) + config.pin_budget_frames + geometry.frames_for(pages)
    return frames * geometry.frame_bytes


def plan_lines(config: PoolConfig, geometry: Geometry, layout: Layout) -> list[str]:
    """The table an operator reads at start: sizes, cuts, waste, and how many requests fit."""
    exchange = exchange_frames(config, layout.frame_bytes)
    usable = layout.num_frames - fixed_frames(config, layout.frame_bytes) - config.pin_budget_frames
    shared = f"{shared_frames(config, layout.frame_bytes)} shared weights, " if config.shared_bytes else ""
    lines = [
        f"arena {layout.arena_bytes} bytes = {layout.num_frames} frames of {layout.frame_bytes} bytes: "
        f"1 dummy, {exchange} exchange, {shared}{config.pin_budget_frames} for pins, {usable} for requests and cache"
    ]
    for kind, waste in zip(layout.kinds, geometry.waste, strict=True):
        extent = f"{kind.tokens_per_page} tokens" if kind.tokens_per_page else f"{kind.pages_per_req} a request"
        window = f", window {kind.window}" if kind.window else ""
        lines.append(
            f"kind {kind.name}: {kind.page_bytes} bytes a page ({extent}{window}), "
            f"{kind.pages_per_frame} pages a frame, waste {100 * waste:.1f} %"
        )
    fits = [
        f"{tokens // 1024}k: {requests_that_fit(layout, tokens, usable, config.slack_tokens)}"
        for tokens in (1024, 4096, 16384)
    ]
    lines.append(f"requests that fit, by tokens: {', '.join(fits)}")
    return lines


def requests_that_fit(layout: Layout, tokens: int, usable: int, slack_tokens: int) -> int:
    """Requests that may run at once up to so many tokens each, their pages packed densely in usable frames.

    slack_tokens: slots that each needs beyond them, for steps in flight.
    """

    def frames(num_reqs: int) -> int:
        return sum(-(-num_reqs * _pages(kind, tokens, slack_tokens) // kind.pages_per_frame) for kind in layout.kinds)

    low, high = 0, usable + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if frames(middle) <= usable else (low, middle)
    return low


def _pages(kind: KindLayout, tokens: int, slack_tokens: int) -> int:
    if not kind.tokens_per_page:
        return kind.pages_per_req
    whole = -(-(tokens + slack_tokens) // kind.tokens_per_page)
    if not kind.window:
        return whole
    # Of a window that lies across pages, one more is touched.
    return min(whole, -(-(kind.window + slack_tokens) // kind.tokens_per_page) + 1)
