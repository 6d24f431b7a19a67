"""Sizes the arena before anything is allocated, with the solver that the memory service itself uses."""

from launch.config import LaunchConfig
from launch.models import Models
from launch.plan import KindPlan, MemoryPlan
from memsvc.arena import available_bytes
from memsvc.core.config import PoolConfig
from memsvc.core.geometry import Geometry, exchange_frames, make_layout, plan_lines, smallest_arena, solve
from memsvc.wire.mem import KindLayout, KindSpec, Layout

STEPS_IN_FLIGHT = 2
"""Steps of the target that may hold slots at once; a request reserves for these and one more."""
DEFAULT_SHARE = 4
"""Without --mem-bytes at most one part in so many of the available memory is taken,"""
DEFAULT_LIMIT = 4 << 30
"""and at most this, unless a single request of context_len needs more: all of it is committed at start."""
_FITS = "requests that fit, by tokens: "
"""What stands before the lengths in the lines of geometry.plan_lines."""


def make_plan(config: LaunchConfig, models: Models, available: int | None = None) -> tuple[PoolConfig, MemoryPlan]:
    """The pool as the memory service is told it, and the plan. available: bytes, None asks the system.

    Raises ValueError, with the numbers, if the arena is too small or larger than what is there.
    """
    free = available_bytes() if available is None else available
    geometry = solve(list(models.kinds))
    sizeless = _pool(config, models, arena_bytes=0)
    smallest = smallest_arena(sizeless, geometry)
    fixed = 1 + exchange_frames(sizeless, geometry.frame_bytes)
    tokens = models.context_len + sizeless.slack_tokens
    one = _bytes_for(geometry, models.kinds, fixed, tokens, 1)
    everything = max(one, _bytes_for(geometry, models.kinds, fixed, tokens, config.max_running_requests))
    arena = config.mem_bytes or _default_bytes(smallest, one, everything, free - models.weight_bytes)
    if arena < smallest:
        raise ValueError(f"--mem-bytes is {arena}, the smallest that works is {smallest}")
    if arena > free:
        raise ValueError(f"--mem-bytes is {arena}, only {free} bytes of memory are available")
    pool = _pool(config, models, arena_bytes=arena)
    layout = make_layout(pool, geometry)
    lines = [*_within(models.context_len, plan_lines(pool, geometry, layout)), *_more_lines(models, arena, one)]
    return pool, MemoryPlan(
        arena_bytes=arena,
        smallest_bytes=smallest,
        one_request_bytes=one,
        all_requests_bytes=everything,
        frame_bytes=layout.frame_bytes,
        num_frames=layout.num_frames,
        exchange_bytes=layout.exchange_bytes,
        kinds=tuple(_kind_plan(kind) for kind in layout.kinds),
        pool_tokens=_pool_tokens(layout, fixed),
        lines=tuple(lines),
    )


def _pool(config: LaunchConfig, models: Models, arena_bytes: int) -> PoolConfig:
    rows = max(config.max_prefill_tokens, config.max_running_requests * models.block_size)
    slack = (STEPS_IN_FLIGHT + 1) * models.block_size
    return PoolConfig(
        arena_bytes=arena_bytes,
        page_size=config.page_size,
        kinds=list(models.kinds),
        exchange_bytes=rows * models.feature_row_bytes,
        eviction_policy=config.eviction_policy,
        ttl_s=config.ttl_s,
        checkpoint_interval=config.checkpoint_interval,
        slack_tokens=slack,
        max_extend_tokens=(STEPS_IN_FLIGHT + 1) * rows + slack,
    )


def _bytes_for(geometry: Geometry, kinds: tuple[KindSpec, ...], fixed: int, tokens: int, num_reqs: int) -> int:
    """Bytes in which so many requests of so many tokens fit, packed densely, windows not taken into account."""
    pages = [num_reqs * (kind.pages_per_req or -(-tokens // kind.tokens_per_page)) for kind in kinds]
    return (fixed + geometry.frames_for(pages)) * geometry.frame_bytes


def _default_bytes(smallest: int, one: int, everything: int, free: int) -> int:
    return max(smallest, min(everything, max(DEFAULT_LIMIT, one), free // DEFAULT_SHARE))


def _pool_tokens(layout: Layout, fixed: int) -> int:
    frames_per_page = sum(1 / kind.pages_per_frame for kind in layout.kinds if kind.tokens_per_page)
    # At least one request holds them, with its states and rings.
    one = sum(-(-kind.pages_per_req // kind.pages_per_frame) for kind in layout.kinds)
    return int(max(0, layout.num_frames - fixed - one) / frames_per_page) * layout.page_size


def _within(context_len: int, lines: list[str]) -> list[str]:
    """The lines of a pool, which knows no context, without requests longer than one; no line of them if none is left."""
    kept = []
    for line in lines:
        if not line.startswith(_FITS):
            kept.append(line)
            continue
        fits = line.removeprefix(_FITS).split(", ")
        shown = [fit for fit in fits if int(fit.partition("k")[0]) * 1024 <= context_len]
        if shown:
            kept.append(_FITS + ", ".join(shown))
    return kept


def _more_lines(models: Models, arena: int, one: int) -> list[str]:
    lines = [f"weights {models.weight_bytes} bytes, beside the arena"]
    if arena < one:
        lines.append(f"a request of context_len {models.context_len} needs {one} bytes: such long ones are refused")
    return lines


def _kind_plan(kind: KindLayout) -> KindPlan:
    return KindPlan(
        name=kind.name,
        page_bytes=kind.page_bytes,
        stride_bytes=kind.stride_bytes,
        pages_per_frame=kind.pages_per_frame,
        tokens_per_page=kind.tokens_per_page,
        pages_per_req=kind.pages_per_req,
        window=kind.window,
    )
