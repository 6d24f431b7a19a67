"""What the server says about itself: /server_info, /model_info, /version, /check."""

from importlib import metadata
from typing import Any

from msgspec.structs import asdict

from launch.http.config import FrontConfig
from launch.http.engine import Engine
from memsvc.wire.admin import CheckReport, Stats

_STATES = ("free", "private", "tree", "pinned", "limbo", "quarantine")


def version() -> str:
    """The installed version of the project, or "source" when it runs from a checkout."""
    try:
        return metadata.version("memsvc")
    except metadata.PackageNotFoundError:
        return "source"


def model_info(config: FrontConfig) -> dict[str, Any]:
    """Fields that gateways read."""
    return {
        "model_path": config.model_path,
        "tokenizer_path": config.model_path,
        "served_model_name": config.model_name,
        "is_generation": True,
        "weight_version": "default",
    }


def server_info(engine: Engine, stats: Stats | None) -> dict[str, Any]:
    """Settings in both spellings that clients know, the memory plan, and what is going on now."""
    config = engine.config
    with_draft = bool(config.draft_model_path)
    return {
        **model_info(config),
        "version": version(),
        "tp_size": 1,
        "dp_size": 1,
        "page_size": config.page_size,
        "block_size": config.page_size,
        "context_length": config.context_len,
        "max_total_num_tokens": config.plan.pool_tokens if config.plan else None,
        "max_running_requests": config.max_running_requests,
        "max_queued_requests": config.max_queued_requests,
        "speculative_algorithm": "DFLASH" if with_draft else None,
        "speculative_draft_model_path": config.draft_model_path or None,
        "speculative_num_draft_tokens": config.block_size if with_draft else None,
        "num_speculative_tokens": config.num_draft_tokens,
        "speculative_widths": list(config.widths) or None,
        "propose_route": config.propose_route if with_draft else None,
        "launch_command": list(config.launch_command),
        "processes": engine.peers.report(),
        "memory_plan": config.plan,
        "internal_states": [_internal_state(engine, stats)],
    }


def check_body(report: CheckReport, stats: Stats, num_live: int) -> dict[str, Any]:
    """The memory service's audit. idle: no request is open or in flight, so every page is free or in the tree."""
    return {
        "idle": stats.num_reqs == 0 and num_live == 0,
        "leaked_bytes": report.leaked_bytes,
        "problems": [asdict(problem) for problem in report.problems],
        "num_pages_checked": report.num_pages_checked,
        "pages": {kind.name: {state: getattr(kind, f"num_{state}") for state in _STATES} for kind in stats.kinds},
    }


def _internal_state(engine: Engine, stats: Stats | None) -> dict[str, Any]:
    target = engine.stats
    accept_length = None
    if target is not None and target.num_drafts:
        accept_length = 1 + target.num_accepted / target.num_drafts
    return {
        "avg_spec_accept_length": accept_length,
        "num_running_reqs": target.num_running if target else 0,
        "num_live_reqs": len(engine.journal),
        "memory": _memory(stats) if stats else None,
    }


def _memory(stats: Stats) -> dict[str, Any]:
    # Messages are arrays on the wire; people want names.
    return {**asdict(stats), "kinds": [asdict(kind) for kind in stats.kinds]}
