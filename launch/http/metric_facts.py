"""The numbers behind /metrics, each under all the names it is known by."""

from collections.abc import Iterator
from dataclasses import dataclass

from launch.http.config import FrontConfig
from launch.http.engine import Engine
from memsvc.wire.admin import KindStats, Stats
from memsvc.wire.text import EngineStats

Labels = dict[str, str]

_STATES = ("free", "private", "tree", "pinned", "limbo", "quarantine")
_TARGET_KIND = "target_kv"


@dataclass(frozen=True, slots=True)
class Fact:
    """names: separated by spaces. samples: own labels and value; those of one fact have the same label names."""

    names: str
    text: str
    samples: list[tuple[Labels, float]]
    is_counter: bool = False


def _gauge(names: str, text: str, value: float) -> Fact:
    return Fact(names, text, [({}, value)])


def _counter(names: str, text: str, value: float) -> Fact:
    return Fact(names, text, [({}, value)], is_counter=True)


def engine_facts(engine: Engine) -> Iterator[Fact]:
    """What front and target know."""
    target = engine.stats
    running = target.num_running if target else 0
    waiting = max(0, len(engine.journal) - running)
    yield _gauge("memsvc_requests_running vllm:num_requests_running sglang:num_running_reqs",
                 "Requests that hold memory", running)  # fmt: skip
    yield _gauge("memsvc_requests_waiting vllm:num_requests_waiting sglang:num_queue_reqs",
                 "Requests accepted and not running", waiting)  # fmt: skip
    yield _gauge("memsvc_journal_bytes", "Prompts and answers kept for a restart", engine.journal.num_bytes)
    yield _counter("memsvc_requests_turned_away", "Requests answered 429", engine.tally.turned_away)
    finished = [({"finished_reason": reason.value}, float(num)) for reason, num in engine.tally.finished.items()]
    yield Fact("memsvc_requests_finished vllm:request_success", "Requests by how they ended", finished, True)
    up = [({"role": role}, float(engine.peers.is_up(role))) for role in engine.peers.generations]
    yield Fact("memsvc_process_up", "Whether a process serves", up)
    starts = [({"role": role}, float(num)) for role, num in engine.peers.generations.items()]
    yield Fact("memsvc_process_starts", "How often a process was started", starts)
    if target is not None:
        yield from _target_facts(target)


def _target_facts(target: EngineStats) -> Iterator[Fact]:
    yield _counter("memsvc_prompt_tokens vllm:prompt_tokens sglang:prompt_tokens",
                   "Prompt tokens taken in", target.prompt_tokens)  # fmt: skip
    yield _counter("memsvc_prompt_tokens_cached vllm:prompt_tokens_cached sglang:cached_tokens",
                   "Prompt tokens found in the cache", target.cached_tokens)  # fmt: skip
    yield _counter("memsvc_generation_tokens vllm:generation_tokens sglang:generation_tokens",
                   "Tokens generated", target.generated_tokens)  # fmt: skip
    yield _counter("memsvc_target_steps", "Steps of the target", target.num_steps)
    yield _counter("memsvc_retracts vllm:num_preemptions", "Running requests taken back", target.num_retracts)
    yield _gauge("sglang:num_retracted_reqs", "Running requests taken back", target.num_retracts)
    yield _counter("memsvc_spec_steps vllm:spec_decode_num_drafts sglang:spec_verify_calls",
                   "Blocks verified", target.num_drafts)  # fmt: skip
    yield _counter("memsvc_spec_draft_tokens vllm:spec_decode_num_draft_tokens",
                   "Draft tokens verified", target.num_draft_tokens)  # fmt: skip
    yield _counter("memsvc_spec_accepted_tokens vllm:spec_decode_num_accepted_tokens",
                   "Draft tokens accepted", target.num_accepted)  # fmt: skip
    per_pos = [({"position": str(pos)}, float(num)) for pos, num in enumerate(target.accepted_per_pos)]
    yield Fact("memsvc_spec_accepted_tokens_per_pos vllm:spec_decode_num_accepted_tokens_per_pos",
               "Draft tokens accepted at each position of a block", per_pos, True)  # fmt: skip
    length = 1 + target.num_accepted / target.num_drafts if target.num_drafts else 0.0
    rate = target.num_accepted / target.num_draft_tokens if target.num_draft_tokens else 0.0
    yield _gauge("sglang:spec_accept_length", "Tokens per verified block, the target's own included", length)
    yield _gauge("sglang:spec_accept_rate", "Accepted share of the draft tokens", rate)
    yield _gauge("sglang:spec_num_draft_tokens", "Draft tokens verified", target.num_draft_tokens)
    yield from _width_facts(target)


def _width_facts(target: EngineStats) -> Iterator[Fact]:
    yield _gauge("memsvc_spec_width", "Drafts of each block in the newest step", target.width)
    columns = {
        "steps": ("Steps by drafts of a block", target.width_steps),
        "tokens": ("Tokens of these steps, without the first of a request", target.width_tokens),
        "seconds": ("Time of these steps", target.width_seconds),
    }
    for name, (text, numbers) in columns.items():
        samples = [({"drafts": str(k)}, float(num)) for k, num in zip(target.widths, numbers, strict=True)]
        yield Fact(f"memsvc_spec_width_{name}", text, samples, True)


def front_link_fact(bad_frames: dict[str, int]) -> Fact:
    """Garbage on the front's own sockets."""
    samples = [({"link": link}, float(num)) for link, num in bad_frames.items()]
    return Fact("memsvc_front_bad_frames", "Frames that were no message", samples, True)


def memory_facts(stats: Stats, config: FrontConfig) -> Iterator[Fact]:
    """What the memory service knows."""
    yield from _arena_facts(stats)
    yield from _cache_facts(stats, config)
    yield _counter("memsvc_hit_tokens vllm:prefix_cache_hits", "Tokens found in the cache", stats.hit_tokens)
    yield _counter("memsvc_queried_tokens vllm:prefix_cache_queries", "Tokens looked up", stats.queried_tokens)
    rate = stats.hit_tokens / stats.queried_tokens if stats.queried_tokens else 0.0
    yield _gauge("sglang:cache_hit_rate", "Share of looked-up tokens that were found", rate)
    yield _counter("memsvc_draft_hit_short", "Hits with a hole in the draft's window", stats.draft_hit_short)
    yield _counter("memsvc_opens", "Requests opened", stats.num_opens)
    closes = [({"reason": reason}, float(num)) for reason, num in stats.num_closes.items()]
    yield Fact("memsvc_closes", "Requests closed", closes, True)
    yield _counter("memsvc_no_room", "Reservations that did not fit", stats.num_no_room)
    yield _counter("memsvc_too_large", "Requests that can never fit", stats.num_too_large)
    yield _counter("memsvc_steps", "Steps handled", stats.num_steps)
    yield _counter("memsvc_step_seconds", "Time spent in handling steps", stats.step_seconds)
    yield _counter("memsvc_bad_frames", "Messages that were none", stats.num_bad_frames)
    yield _gauge("memsvc_open_requests", "Requests open in the memory service", stats.num_reqs)
    yield _gauge("memsvc_clients", "Registered workers", stats.num_clients)


def _arena_facts(stats: Stats) -> Iterator[Fact]:
    cut = sum(kind.num_frames for kind in stats.kinds)
    frames = {"dummy": stats.frames_dummy, "exchange": stats.frames_exchange, "shared": stats.frames_shared,
              "empty": stats.frames_empty, "cut": cut}  # fmt: skip
    yield Fact("memsvc_frames", "Frames of the arena", [({"state": k}, float(v)) for k, v in frames.items()])
    yield _gauge("memsvc_frame_bytes", "Bytes of a frame", stats.frame_bytes)
    yield _gauge("memsvc_arena_bytes", "Bytes of the arena", stats.num_frames * stats.frame_bytes)
    yield _gauge("memsvc_unusable_bytes", "Free bytes that no kind can use as they are", stats.unusable_bytes)
    by_kind = [({"kind": kind.name}, float(kind.num_frames * stats.frame_bytes)) for kind in stats.kinds]
    yield Fact("memsvc_kind_bytes", "Bytes of the frames cut for a kind", by_kind)
    pages = [(kind, state, _pages(kind, state)) for kind in stats.kinds for state in _STATES]
    yield Fact("memsvc_pages", "Pages by kind and state",
               [({"kind": kind.name, "state": state}, float(num)) for kind, state, num in pages])  # fmt: skip
    yield Fact("memsvc_page_bytes", "Bytes of the pages by kind and state",
               [({"kind": kind.name, "state": state}, float(num * kind.page_bytes))
                for kind, state, num in pages])  # fmt: skip
    evicted = zip(stats.kinds, stats.evicted_pages, strict=False)
    yield Fact("memsvc_evicted_pages", "Pages evicted",
               [({"kind": kind.name}, float(num)) for kind, num in evicted], True)  # fmt: skip


def _cache_facts(stats: Stats, config: FrontConfig) -> Iterator[Fact]:
    """The pool as other engines describe it: one kind of page, in tokens."""
    pool_tokens = config.plan.pool_tokens if config.plan else 0
    fixed = stats.frames_dummy + stats.frames_exchange + stats.frames_shared
    usable = (stats.num_frames - fixed) * stats.frame_bytes
    held = sum(kind.page_bytes * sum(_pages(kind, s) for s in _STATES if s not in ("free", "tree"))
               for kind in stats.kinds)  # fmt: skip
    usage = held / usable if usable else 0.0
    yield _gauge("vllm:kv_cache_usage_perc sglang:token_usage",
                 "Share of the pool in pages that are neither free nor only cached", usage)  # fmt: skip
    yield _gauge("sglang:num_used_tokens", "token_usage in tokens", round(usage * pool_tokens))
    yield _gauge("sglang:max_total_num_tokens", "Tokens that fit into the pool", pool_tokens)
    tree = sum(kind.num_tree for kind in stats.kinds if kind.name == _TARGET_KIND)
    yield _gauge("sglang:kv_evictable_tokens", "Tokens with cached target KV", tree * config.page_size)
    evicted = sum(num for kind, num in zip(stats.kinds, stats.evicted_pages, strict=False) if kind.name == _TARGET_KIND)
    yield _counter("sglang:evicted_tokens", "Tokens whose target KV was evicted", evicted * config.page_size)
    yield _gauge("sglang:page_size", "Tokens of a page", config.page_size)
    num_pages = pool_tokens // config.page_size
    yield _gauge("sglang:num_pages", "Pages that fit into the pool", num_pages)
    info = {"block_size": config.page_size, "num_gpu_blocks": num_pages, "page_size": config.page_size,
            "num_pages": num_pages}  # fmt: skip
    labels = {name: str(value) for name, value in info.items()}
    yield Fact("vllm:cache_config_info sglang:cache_config_info", "Settings of the pool", [(labels, 1.0)])


def _pages(kind: KindStats, state: str) -> int:
    return getattr(kind, f"num_{state}")
