"""The order in which cached text goes, and what stays."""

import pytest

from memsvc.core.eviction import EvictionQueue, is_valid
from memsvc.core.manager import MemoryManager
from memsvc.core.radix import Node, Root
from memsvc.wire.admin import Evict, Evicted, Flush, GetStats, Match, Matched, Stats
from memsvc.wire.base import pack_tokens
from tests.support.mem_builders import DRAFT, TARGET, Clock, Engine, check, make_config, windowed

CHATS = {name: [ord(name)] * 2 + [1, 2, 3, 4, 5, 6] for name in "abc"}


def cached(manager: MemoryManager, tokens: list[int]) -> int:
    matched = manager.handle_admin(Match(tokens=pack_tokens(tokens)))
    assert isinstance(matched, Matched)
    return matched.prefix_len


def evict(manager: MemoryManager, num: int, kind: str = "target_kv") -> list[int]:
    evicted = manager.handle_admin(Evict(kind=kind, num_pages=num))
    assert isinstance(evicted, Evicted)
    check(manager)
    return evicted.num_pages


def make(policy: str) -> tuple[MemoryManager, Clock, Engine]:
    clock = Clock()
    manager = MemoryManager(make_config(40, eviction_policy=policy), clock=clock)
    return manager, clock, Engine(manager)


def run(engine: Engine, clock: Clock, rid: int, tokens: list[int], priority: int = 0) -> None:
    clock.now += 1
    engine.run(rid, tokens, priority=priority)
    engine.close(rid)


def test_lru_evicts_the_tail_of_the_longest_unused_text() -> None:
    manager, clock, engine = make("lru")
    for rid, name in enumerate("abc", start=1):
        run(engine, clock, rid, CHATS[name])
    run(engine, clock, 4, [*CHATS["a"], 7])
    assert evict(manager, 3) == [3, 3]
    assert [cached(manager, CHATS[name]) for name in "abc"] == [8, 2, 8]
    assert evict(manager, 2) == [2, 2]
    assert [cached(manager, CHATS[name]) for name in "abc"] == [8, 0, 6]


def test_lfu_keeps_what_is_hit_often() -> None:
    manager, clock, engine = make("lfu")
    run(engine, clock, 1, CHATS["a"])
    run(engine, clock, 2, [*CHATS["a"], 7])
    run(engine, clock, 3, CHATS["b"])
    evict(manager, 4)
    assert [cached(manager, CHATS[name]) for name in "ab"] == [8, 0]


def test_priority_keeps_what_matters() -> None:
    manager, clock, engine = make("priority")
    run(engine, clock, 1, CHATS["a"], priority=5)
    run(engine, clock, 2, CHATS["b"], priority=1)
    run(engine, clock, 3, CHATS["c"], priority=3)
    evict(manager, 5)
    assert [cached(manager, CHATS[name]) for name in "abc"] == [8, 0, 6]


def test_a_shared_beginning_goes_last() -> None:
    manager, clock, engine = make("lru")
    run(engine, clock, 1, [1, 2, 3, 4, 5, 6])
    run(engine, clock, 2, [1, 2, 3, 4, 7, 8])
    assert evict(manager, 1) == [1, 1]
    assert (cached(manager, [1, 2, 3, 4, 5, 6]), cached(manager, [1, 2, 3, 4, 7, 8])) == (4, 6)
    assert evict(manager, 1) == [1, 1]
    assert cached(manager, [1, 2, 3, 4]) == 4


def test_flush_leaves_exactly_what_is_held() -> None:
    manager, clock, engine = make("lru")
    run(engine, clock, 1, CHATS["a"])
    run(engine, clock, 2, CHATS["b"])
    engine.open(3, [*CHATS["a"], 9])
    manager.handle_admin(Flush())
    check(manager)
    assert [cached(manager, CHATS[name]) for name in "ab"] == [8, 0]
    engine.close(3)
    manager.handle_admin(Flush())
    stats = manager.handle_admin(GetStats())
    assert isinstance(stats, Stats)
    assert stats.frames_empty == stats.num_frames - 1


def test_draft_pages_below_every_window_can_go_while_their_text_is_held() -> None:
    manager = MemoryManager(make_config(40, [TARGET, windowed(DRAFT, 4)]), clock=Clock())
    engine = Engine(manager)
    engine.run(1, list(range(12)))
    check(manager)
    assert evict(manager, 4, "draft_kv") == [0, 4]
    assert evict(manager, 1, "draft_kv") == [0, 0]
    assert cached(manager, list(range(12))) == 12


def test_draft_pages_that_the_next_hit_needs_outlive_older_ones() -> None:
    clock = Clock()
    manager = MemoryManager(make_config(40, [TARGET, windowed(DRAFT, 4)]), clock=clock)
    engine = Engine(manager)
    engine.run(1, list(range(12)))
    engine.close(1)
    clock.now += 1
    opened = engine.open(2, list(range(13))).opened[0]
    assert opened.draft_valid_from == 8  # type: ignore[union-attr]
    assert evict(manager, 9, "draft_kv") == [0, 4]
    engine.close(2)
    assert engine.open(3, list(range(13))).opened[0].draft_valid_from == 8  # type: ignore[union-attr]


def test_an_unknown_kind_is_refused_by_name() -> None:
    manager, _, _ = make("lru")
    assert "unknown kind 'x'" in str(manager.handle_admin(Evict(kind="x", num_pages=1)))


@pytest.mark.parametrize("num", [1, 3])
def test_stale_entries_never_outnumber_live_ones_for_long(num: int) -> None:
    queue = EvictionQueue("lru")
    root = Root("m", "", 1)
    nodes = [Node(root, 0, b"", []) for _ in range(num)]
    for _ in range(3 * queue.MIN_COMPACT):
        for node in nodes:
            queue.push_tail(node)
    assert len(queue) <= queue.MIN_COMPACT
    assert all(is_valid(entry) for entry in queue.entries())
    assert len(queue.entries()) == num
