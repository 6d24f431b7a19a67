"""slru and ttl: what was hit twice stays longer, what nobody comes back for goes by itself."""

from typing import Any

import pytest

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import Evict, Match, Matched, Pin
from memsvc.wire.base import pack_tokens
from tests.support.mem_builders import (
    DRAFT,
    RECURRENT,
    TARGET,
    Clock,
    Engine,
    check,
    make_config,
    stats_of,
    windowed,
)

CHATS = {name: [ord(name)] * 2 + [1, 2, 3, 4, 5, 6] for name in "abc"}


def make(policy: str, kinds: Any = (TARGET, DRAFT), **config: Any) -> tuple[MemoryManager, Clock, Engine]:
    clock = Clock()
    manager = MemoryManager(make_config(60, list(kinds), eviction_policy=policy, **config), clock=clock)
    return manager, clock, Engine(manager, kinds=tuple(kind.name for kind in kinds))


def run(engine: Engine, clock: Clock, rid: int, tokens: list[int]) -> None:
    clock.now += 1
    engine.run(rid, tokens)
    engine.close(rid)


def cached(manager: MemoryManager, *names: str) -> list[int]:
    return [matched(manager, CHATS[name]).prefix_len for name in names]


def matched(manager: MemoryManager, tokens: list[int]) -> Matched:
    found = manager.handle_admin(Match(tokens=pack_tokens(tokens)))
    assert isinstance(found, Matched)
    return found


def evict(manager: MemoryManager, num: int, kind: str = "target_kv") -> None:
    manager.handle_admin(Evict(kind=kind, num_pages=num))
    check(manager)


# --- slru ---


def test_two_hits_protect_and_one_does_not() -> None:
    manager, clock, engine = make("slru")
    for rid, name in enumerate("aabbb", start=1):
        run(engine, clock, rid, [*CHATS[name], rid])
    run(engine, clock, 6, CHATS["c"])
    # a was hit once, b twice, c never; a is the oldest, c the newest
    evict(manager, 4)
    assert cached(manager, "a", "b", "c") == [0, 8, 8]
    evict(manager, 4)
    assert cached(manager, "a", "b", "c") == [0, 8, 0]
    evict(manager, 1)
    assert cached(manager, "b") == [6]


def test_among_equals_the_longest_unused_goes_first() -> None:
    manager, clock, engine = make("slru")
    for rid, name in enumerate("bbbaaa", start=1):
        run(engine, clock, rid, [*CHATS[name], rid])
    evict(manager, 4)
    assert cached(manager, "a", "b") == [8, 0]


def test_one_long_scan_does_not_push_out_a_shared_prompt() -> None:
    manager, clock, engine = make("slru")
    for rid in (1, 2, 3):
        run(engine, clock, rid, [*CHATS["a"], rid])
    for rid in range(4, 40):
        run(engine, clock, rid, [rid] * 12)
        check(manager)
    assert any(stats_of(manager).evicted_pages)
    assert cached(manager, "a") == [8]


def test_a_state_of_text_that_was_hit_twice_outlives_newer_ones() -> None:
    manager, clock, engine = make("slru", RECURRENT)
    for rid, name in enumerate("aaac", start=1):
        clock.now += 1
        engine.run(rid, [*CHATS[name], rid])
        engine.close(rid, freeze_at=8 if rid in (1, 4) else 0)
    evict(manager, 1, "state")
    assert [matched(manager, CHATS[name]).state_len for name in "ac"] == [8, 0]


# --- ttl ---


def test_text_that_is_unused_for_its_time_goes_without_need() -> None:
    manager, clock, engine = make("ttl", ttl_s=10.0)
    run(engine, clock, 1, CHATS["a"])
    clock.now += 6
    run(engine, clock, 2, CHATS["b"])
    clock.now += 5
    manager.tick()
    check(manager)
    assert cached(manager, "a", "b") == [0, 8]
    clock.now += 6
    manager.tick()
    engine.step(done_step=engine.num)
    stats = stats_of(manager)
    assert stats.frames_empty + 1 == stats.num_frames


def test_coming_back_starts_the_time_anew_for_what_was_hit() -> None:
    manager, clock, engine = make("ttl", ttl_s=10.0)
    run(engine, clock, 1, CHATS["a"])
    clock.now += 9
    run(engine, clock, 2, [*CHATS["a"][:4], 9])
    clock.now += 5
    manager.tick()
    assert cached(manager, "a") == [4]
    check(manager)


def test_what_is_held_does_not_expire() -> None:
    manager, clock, engine = make("ttl", ttl_s=10.0, pin_budget_frames=8)
    run(engine, clock, 1, CHATS["a"])
    run(engine, clock, 2, CHATS["b"])
    engine.open(3, [*CHATS["a"], 9])
    manager.handle_admin(Pin(name="b", tokens=pack_tokens(CHATS["b"]), ttl_s=100.0))
    clock.now += 50
    manager.tick()
    assert cached(manager, "a", "b") == [8, 8]
    assert matched(manager, CHATS["a"]).draft_valid_from == 0
    check(manager)


def test_draft_pages_below_the_window_of_a_running_request_expire_too() -> None:
    manager, clock, engine = make("ttl", (TARGET, windowed(DRAFT, 4)), ttl_s=10.0)
    engine.run(1, list(range(12)))
    clock.now += 20
    manager.tick()
    check(manager)
    assert stats_of(manager).evicted_pages == [0, 4]


def test_tick_says_when_the_next_text_is_due() -> None:
    manager, clock, engine = make("ttl", ttl_s=10.0, idle_check_s=1e6)
    run(engine, clock, 1, CHATS["a"])
    clock.now += 4
    assert manager.tick() == pytest.approx(6.0)
    clock.now += 6
    assert manager.tick() > 100
    assert cached(manager, "a") == [0]


def test_a_state_expires_by_its_own_age() -> None:
    manager, clock, engine = make("ttl", RECURRENT, ttl_s=10.0, checkpoint_interval=2)
    clock.now += 1
    engine.run(1, CHATS["a"])
    engine.freeze(1, 4)
    engine.close(1, freeze_at=8)
    clock.now += 6
    engine.open(2, [*CHATS["a"], 9])
    engine.close(2)
    clock.now += 5
    assert matched(manager, CHATS["a"][:4]).state_len == 4
    manager.tick()
    check(manager)
    assert (matched(manager, CHATS["a"][:4]).state_len, matched(manager, CHATS["a"]).state_len) == (0, 8)


@pytest.mark.parametrize("policy", ["lru", "slru", "lfu", "priority"])
def test_no_other_policy_evicts_by_time(policy: str) -> None:
    manager, clock, engine = make(policy, ttl_s=1.0)
    run(engine, clock, 1, CHATS["a"])
    clock.now += 1000
    manager.tick()
    assert cached(manager, "a") == [8]
