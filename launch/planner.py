"""Sizes the arena before anything is allocated, with the solver that the memory service itself uses."""

from typing import NamedTuple

from launch.card import Card
from launch.config import LaunchConfig
from launch.device_memory import device_parts, shared_bytes
from launch.models import Models
from launch.plan import DevicePart, DevicePlan, KindPlan, MemoryPlan
from memsvc.arena import available_bytes
from memsvc.core.config import PoolConfig
from memsvc.core.geometry import Geometry, fixed_frames, make_layout, plan_lines, smallest_arena, solve
from memsvc.device.fixed_frames import ExchangeLayout
from memsvc.slot_layout import SlotLayout
from memsvc.wire.mem import KindLayout, KindSpec, Layout
from target_worker.step_sizes import StepSizes

STEPS_IN_FLIGHT = 2
"""Steps of the target that may hold slots at once; a request reserves for these and one more."""
DEFAULT_SHARE = 4
"""Without --mem-bytes at most one part in so many of the available memory is taken,"""
DEFAULT_LIMIT = 4 << 30
"""and at most this, unless a single request of context_len needs more: all of it is committed at start."""
_FITS = "requests that fit, by tokens: "
"""What stands before the lengths in the lines of geometry.plan_lines."""


def make_plan(
    config: LaunchConfig, models: Models, available: int | None = None, card: Card | None = None
) -> tuple[PoolConfig, MemoryPlan]:
    """The pool as the memory service is told it, and the plan.

    available: bytes of CPU memory; None asks the system. card: the device, for a server on one. Raises ValueError,
    with the numbers, if the arena is too small or larger than what is there.
    """
    geometry = solve(list(models.kinds))
    sizes = _sizes(config, models, geometry)
    if config.is_cuda:
        assert card is not None, f"a plan for {config.device} without its sizes"
        device = _device_plan(config, card, device_parts(config, models), sizes.smallest)
        arena = device.planned_bytes - sum(part.num_bytes for part in device.parts)
    else:
        free = available_bytes() if available is None else available
        device, arena = None, _cpu_bytes(config, models, sizes, free)
    pool = _pool(config, models, arena_bytes=arena)
    layout = make_layout(pool, geometry)
    lines = [
        *_within(models.context_len, plan_lines(pool, geometry, layout)),
        *(_device_lines(device, layout) if device else [f"weights {models.weight_bytes} bytes, beside the arena"]),
        *_more_lines(models, arena, sizes.one),
    ]
    return pool, MemoryPlan(
        arena_bytes=arena,
        smallest_bytes=sizes.smallest,
        one_request_bytes=sizes.one,
        all_requests_bytes=sizes.everything,
        frame_bytes=layout.frame_bytes,
        num_frames=layout.num_frames,
        exchange_bytes=layout.exchange_bytes,
        kinds=tuple(_kind_plan(kind) for kind in layout.kinds),
        pool_tokens=_pool_tokens(layout, fixed_frames(pool, layout.frame_bytes)),
        lines=tuple(lines),
        slack_tokens=pool.slack_tokens,
        shared_bytes=layout.shared_bytes,
        device=device,
    )


class _Sizes(NamedTuple):
    """Bytes of arenas."""

    smallest: int
    """The least that works."""
    one: int
    """Holds one request of context_len."""
    everything: int
    """Holds max_running_requests of them."""


def _sizes(config: LaunchConfig, models: Models, geometry: Geometry) -> _Sizes:
    sizeless = _pool(config, models, arena_bytes=0)
    fixed, tokens = fixed_frames(sizeless, geometry.frame_bytes), models.context_len + sizeless.slack_tokens
    one, everything = (
        _bytes_for(geometry, models.kinds, fixed, tokens, num_reqs) for num_reqs in (1, config.max_running_requests)
    )
    return _Sizes(smallest_arena(sizeless, geometry), one, max(one, everything))


def _cpu_bytes(config: LaunchConfig, models: Models, sizes: _Sizes, free: int) -> int:
    smallest, one, everything = sizes
    arena = config.mem_bytes or _default_bytes(smallest, one, everything, free - models.weight_bytes)
    if arena < smallest:
        raise ValueError(f"--mem-bytes is {arena}, the smallest that works is {smallest}")
    if arena > free:
        raise ValueError(f"--mem-bytes is {arena}, only {free} bytes of memory are available")
    return arena


def _device_plan(config: LaunchConfig, card: Card, parts: list[DevicePart], smallest: int) -> DevicePlan:
    """The arena takes what the others leave of the share, in units of the device, or what --mem-bytes says."""
    beside = sum(part.num_bytes for part in parts)
    most = card.free - beside
    share = int(config.mem_fraction_static * card.free) - beside
    arena = -(-config.mem_bytes // card.unit) * card.unit or max(0, share) // card.unit * card.unit
    takes = f"{card.free} of {card.total} bytes of {card.name} are free, weights, contexts and workspaces take {beside}"
    if arena < smallest:
        flag = f"--mem-bytes is {config.mem_bytes}" if config.mem_bytes else (
            f"--mem-fraction-static {config.mem_fraction_static:g} leaves {arena} bytes for the arena"
        )  # fmt: skip
        raise ValueError(f"{flag}, the smallest that works is {smallest}: {takes}")
    if arena > most:
        raise ValueError(f"--mem-bytes is {config.mem_bytes}, at most {max(0, most)} bytes can be had: {takes}")
    return DevicePlan(
        name=card.name,
        total_bytes=card.total,
        free_bytes=card.free,
        planned_bytes=arena + beside,
        parts=tuple(parts),
    )


def _pool(config: LaunchConfig, models: Models, arena_bytes: int) -> PoolConfig:
    sizes = step_sizes(config, models)
    slack = (STEPS_IN_FLIGHT + 1) * models.block_size
    return PoolConfig(
        arena_bytes=arena_bytes,
        page_size=config.page_size,
        kinds=list(models.kinds),
        exchange_bytes=_exchange_bytes(config, models, sizes.feature_rows),
        shared_bytes=shared_bytes(config, models),
        eviction_policy=config.eviction_policy,
        ttl_s=config.ttl_s,
        checkpoint_interval=config.checkpoint_interval,
        slack_tokens=slack,
        max_extend_tokens=(STEPS_IN_FLIGHT + 1) * sizes.max_req_rows + slack,
    )


def step_sizes(config: LaunchConfig, models: Models) -> StepSizes:
    """Those of the target worker that this config starts."""
    return StepSizes(
        is_cuda=config.is_cuda,
        max_running_requests=config.max_running_requests,
        block_size=models.block_size,
        max_prefill_tokens=config.prefill_tokens,
        cuda_graph_max_bs=config.cuda_graph_max_bs,
    )


def _exchange_bytes(config: LaunchConfig, models: Models, num_rows: int) -> int:
    """Rows of features; on a CUDA device the state of the slots too, with a drafter or without."""
    feature_bytes = num_rows * models.feature_row_bytes
    if not config.is_cuda:
        return feature_bytes
    slots = SlotLayout(config.max_running_requests, models.block_size, models.target.vocab_size)
    return ExchangeLayout(feature_bytes=feature_bytes, slot_bytes=slots.num_bytes).num_bytes


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


def _device_lines(device: DevicePlan, layout: Layout) -> list[str]:
    lines = [f"{part.name} {part.num_bytes} bytes, beside the arena" for part in device.parts]
    if layout.shared_bytes:
        lines.append(f"shared weights {layout.shared_bytes} bytes, in the arena")
    share = device.planned_bytes / device.free_bytes
    return [
        *lines,
        f"device {device.name}: {device.planned_bytes} bytes at the peak, {share:.3f} of the {device.free_bytes} that"
        f" are free of {device.total_bytes}",
    ]


def _more_lines(models: Models, arena: int, one: int) -> list[str]:
    if arena >= one:
        return []
    return [f"a request of context_len {models.context_len} needs {one} bytes: such long ones are refused"]


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
