"""Sequences that broke the memory management of other engines, played through on ours: room, deaths, leases.

As in test_memory_anchors, whose docstring says what the list is. Every test is named for the kind of failure.
"""

import gc
from typing import Any

from memsvc.core.manager import MemoryManager
from memsvc.core.radix import Node
from memsvc.wire.admin import Flush
from memsvc.wire.base import ReqId
from memsvc.wire.mem import Close, Fenced, Reserve, TooLarge
from tests.support.mem_asks import assert_empty_after_flush, cached, opened, pages
from tests.support.mem_builders import (
    DRAFT,
    TARGET,
    Clock,
    Engine,
    check,
    make_config,
    make_manager,
    reserve,
    stats_of,
)

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


# --- room ---


def test_hits_are_held_before_anything_is_allocated() -> None:
    # vllm#42948: the allocation evicted the hits of the same request
    engine = Engine(make_manager(11, high_watermark=0.0))
    engine.run(1, TEXT, max_new=0)
    engine.close(1)
    engine.step(done_step=engine.num)
    answer = opened(engine.open(2, [*TEXT, 9], max_new=7))
    assert answer.prefix_len == 8
    engine.reserve(2, 12)
    assert cached(engine.manager, TEXT) == 8
    check(engine.manager)


def test_deadlock_two_prompts_filled_in_part_both_get_the_rest() -> None:
    # vllm#45388: two loads had reserved their loaded part only, and both waited for more
    engine = Engine(make_manager(11, high_watermark=0.0))
    open_rids = [rid for rid in (1, 2, 3, 4) if engine.open(rid, [rid] * 8, max_new=0).opened]
    assert len(open_rids) == 2
    for length in (2, 4, 6, 8):
        for rid in open_rids:
            assert engine.reserve(rid, 2).no_room is None
            engine.commit(rid, length)
    check(engine.manager)


def test_starvation_a_request_larger_than_the_pool_is_refused_for_good_and_the_next_runs() -> None:
    # vllm#39734: it blocked the queue for ever; sglang#19881: it ended the engine
    engine = Engine(make_manager(11))
    reply = engine.open(1, TEXT, max_new=100)
    assert isinstance(reply.opened[0], TooLarge)
    opened(engine.open(2, TEXT, max_new=0))


def test_starvation_a_request_of_the_pools_size_is_filled_to_its_end() -> None:
    # vllm#52520: prefilled to 98.9 %, put back, for ever
    engine = Engine(make_manager(11))
    engine.run(1, list(range(8)), max_new=0)
    engine.close(1)
    prompt = list(range(20))
    answer = opened(engine.open(2, prompt, max_new=0))
    for length in range(answer.prefix_len + 1, 25):
        assert engine.reserve(2, 1).no_room is None
        engine.commit(2, length, tokens=[9] if length > 20 else [])
    check(engine.manager)


def test_estimate_what_fits_by_the_count_can_be_taken() -> None:
    # vllm#45856: the estimate passed, then the pop failed and ended the engine
    engine = Engine(make_manager(14, high_watermark=0.0))
    for rid in (1, 2, 3):
        engine.run(rid, [rid] * 6, max_new=0)
        engine.close(rid)
    engine.open(4, [1] * 6, max_new=0)
    engine.open(5, [2] * 6, max_new=20)
    granted = 0
    while granted < 24 and engine.reserve(5, granted + 2).no_room is None:
        granted += 2
        check(engine.manager)
    assert granted > 8


def test_preemption_a_retry_before_limbo_has_drained_names_no_further_victims() -> None:
    # vllm-ascend#16315: what was preempted came back late, the retry saw no gain and preempted everyone
    engine = Engine(make_manager(19))
    for rid in (1, 2, 3):
        engine.run(rid, [10 * rid] * 8, max_new=4 if rid == 1 else 12)
    no_room = reserve(engine, r1=2, r2=16).no_room
    assert no_room is not None
    assert no_room.victims == [3]
    engine.step(closes=[Close([ReqId(3)], "retract")], done_step=engine.done)
    waits = engine.step(reserve=Reserve([ReqId(1), ReqId(2)], [2, 16]), done_step=engine.done).no_room
    assert waits is None or (waits.victims == [] and waits.waiting_on == "limbo")
    assert engine.step(reserve=Reserve([ReqId(1), ReqId(2)], [2, 16]), done_step=engine.num).no_room is None


def test_check_then_take_across_engines_is_one_act() -> None:
    # kvcached#262: two engines checked, both allocated
    manager = make_manager(11, high_watermark=0.0)
    one, two = Engine(manager, name="one"), Engine(manager, name="two", pid=2)
    one.open(1, [1] * 8, max_new=12)
    assert stats_of(manager).elder == 1
    reply = two.open(1, [2] * 8, max_new=0)
    assert reply.opened == []
    assert reply.open_no_room is not None
    assert one.reserve(1, 20).no_room is None
    check(manager)


def test_verify_evicts_like_everything_else() -> None:
    # atlas#1114: the verify path allocated past the cache and never evicted
    engine = Engine(make_manager(11, high_watermark=0.0))
    for rid in (1, 2):
        engine.run(rid, [rid] * 8, max_new=0)
        engine.close(rid)
    engine.run(3, [3, 3], max_new=14)
    assert engine.reserve(3, 18).no_room is None
    assert sum(stats_of(engine.manager).evicted_pages) > 0
    check(engine.manager)


def test_budget_the_draft_is_counted_once() -> None:
    # tensorrt-llm#12855: the draft doubled the budget
    engine = Engine(make_manager(11))
    reply = engine.open(1, TEXT, max_new=24)
    assert isinstance(reply.opened[0], TooLarge)
    assert reply.opened[0].needs == [18, 18]
    assert reply.opened[0].frames_needed == 9 + 6


# --- what dies or stays too long ---


def test_stale_bytes_a_page_of_another_kind_is_cleared_before_use() -> None:
    # sglang#33974: bytes of another type read as NaN
    engine = Engine(make_manager(11, [TARGET, DRAFT]))
    engine.run(1, TEXT, max_new=0)
    engine.close(1)
    engine.step(done_step=engine.num)
    engine.manager.handle_admin(Flush())
    plain = Engine(engine.manager, name="plain", kinds=("target_kv",), pid=2)
    plain.open(1, [9] * 16, max_new=0)
    grown = plain.reserve(1, 20)
    cleared = set(zip(grown.clear_kinds, grown.clear_pages, strict=True))
    first = {(0, page) for page in grown.grow_pages if page // 2 > 4}
    assert cleared
    assert cleared <= {(0, page) for page in grown.grow_pages}
    assert first <= cleared


def test_host_leak_evicted_text_keeps_no_node_alive() -> None:
    # sglang#25770: evicted nodes kept their links, host memory grew by gigabytes an hour
    engine = Engine(make_manager(20))
    for rid in range(1, 60):
        engine.run(rid, [rid] * 6, max_new=0, salt="long gone")
        engine.close(rid)
    assert_empty_after_flush(engine)
    engine.run(60, TEXT)  # meets what is stale in the eviction queue
    gc.collect()
    assert [node for node in gc.get_objects() if type(node) is Node and node.root.salt == "long gone"] == []


def test_death_a_killed_engine_keeps_nothing() -> None:
    # LMCache#4014, LMCache#4980, LMCache#5265: maps of a killed engine stayed, 112 GB a device
    engine = Engine(make_manager(40))
    engine.run(1, TEXT)
    engine.reserve(1, 4)
    engine.open(2, [9] * 4)
    engine.manager.client_exited(engine.epoch)
    assert (pages(engine.manager, "private"), pages(engine.manager, "quarantine")) == ([0, 0], [0, 0])
    engine.register()
    assert_empty_after_flush(engine)


def test_death_of_the_peer_does_not_hold_an_aborted_requests_pages() -> None:
    # vllm#46283: aborted while the peer that was to load had died
    engine = Engine(make_manager(40))
    draft = Engine(engine.manager, role="draft", kinds=("draft_kv",), pid=2)
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.manager.client_exited(engine.epoch)
    assert pages(engine.manager, "quarantine") == [4, 4]
    engine.manager.client_exited(draft.epoch)
    assert pages(engine.manager, "quarantine") == [0, 0]


def test_lease_an_expired_client_is_fenced_whatever_it_sends() -> None:
    # mooncake#4239, mooncake#730: a batch read skipped the expiry check and read reclaimed bytes
    clock = Clock()
    manager = MemoryManager(make_config(40, lease_ms=1000), clock=clock)
    engine = Engine(manager, pid=0)
    engine.run(1, TEXT)
    clock.now += 2
    manager.tick()
    parts: list[dict[str, Any]] = [{}, {"reserve": Reserve([ReqId(1)], [2])}, {"closes": [Close([ReqId(1)])]}]
    assert [engine.send(**part) for part in parts] == [Fenced(engine.epoch)] * 3
    assert engine.leave() == Fenced(engine.epoch)
    check(manager)
