"""The arena of a bench's target: pages of all its kinds, in no order, as they come after a while."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memsvc.core.config import PoolConfig
from memsvc.core.geometry import fixed_frames, make_layout, solve
from memsvc.wire.base import PageId
from memsvc.wire.mem import KindSpec, Layout
from target_worker.model.config import RING, STATE, TARGET_KV

PAGE_SIZE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPages:
    """What one request holds. Of a dense target all but kv is empty."""

    kv: list[PageId]
    states: list[PageId]
    """Where its states are written,"""
    states_read: list[PageId]
    """and where they are read. Others, if this verify has to write them: then it can be repeated."""
    rings: list[PageId]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What one request needs."""

    num_tokens: int
    writes_states: bool
    """Its verify does."""

    def num_pages(self, kind: KindSpec) -> int:
        """Of a kind."""
        if kind.tokens_per_page:
            return -(-self.num_tokens // kind.tokens_per_page)
        return kind.pages_per_req * (1 + (kind.is_state and self.writes_states))


def lay_out(
    kinds: list[KindSpec], wanted: Mapping[int, Wanted], exchange_bytes: int, rng: np.random.Generator
) -> tuple[Layout, dict[int, SlotPages]]:
    """An arena that holds just this, cut as the memory service would cut it, and the pages of each slot."""
    geometry = solve(kinds)
    totals = [sum(want.num_pages(kind) for want in wanted.values()) for kind in kinds]
    # A request of a single page fits, which is the least that the service takes.
    pool = PoolConfig(arena_bytes=0, page_size=PAGE_SIZE, kinds=kinds, exchange_bytes=exchange_bytes, slack_tokens=0)
    first = fixed_frames(pool, geometry.frame_bytes)
    num_frames = first + geometry.frames_for(totals)
    sized = PoolConfig(
        arena_bytes=num_frames * geometry.frame_bytes, page_size=PAGE_SIZE, kinds=kinds,
        exchange_bytes=exchange_bytes, slack_tokens=0,
    )  # fmt: skip
    layout = make_layout(sized, geometry)
    frames = (rng.permutation(num_frames - first) + first).tolist()
    free: dict[str, list[PageId]] = {}
    for kind, per_frame, total in zip(kinds, geometry.pages_per_frame, totals, strict=True):
        own = [frames.pop() for _ in range(-(-total // per_frame))]
        pages = [PageId(frame * per_frame + i) for frame in own for i in range(per_frame)]
        free[kind.name] = [pages[i] for i in rng.permutation(len(pages))]
    return layout, {slot: _take(kinds, free, want) for slot, want in wanted.items()}


def _take(kinds: list[KindSpec], free: dict[str, list[PageId]], want: Wanted) -> SlotPages:
    taken = {kind.name: [free[kind.name].pop() for _ in range(want.num_pages(kind))] for kind in kinds}
    states = taken.get(STATE, [])
    half = len(states) // 2 if want.writes_states else 0
    return SlotPages(
        kv=taken[TARGET_KV], states=states[half:], states_read=states[:half] or states, rings=taken.get(RING, [])
    )
