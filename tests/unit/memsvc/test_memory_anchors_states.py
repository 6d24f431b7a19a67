"""Sequences that broke the memory management of other engines, played through on ours: recurrent states.

As in test_memory_anchors, whose docstring says what the list is. Every test is named for the kind of failure.
"""

from typing import Any

import pytest

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import Evict, Flush, Pin, Pinned
from memsvc.wire.base import BadRequest, ReqId, pack_tokens
from memsvc.wire.mem import Close, Reserve, TooLarge
from tests.support.mem_asks import assert_empty_after_flush, opened, recurrent
from tests.support.mem_builders import (
    NAMES,
    RECURRENT,
    Clock,
    Engine,
    check,
    make_commit,
    make_config,
    make_freeze,
    stats_of,
)

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]
S = 2
"""Number of the kind of state."""


def talked(engine: Engine, rid: int, tokens: list[int], **fields: Any) -> None:
    """A request that has come and gone, and has left its state at its last full page."""
    engine.run(rid, tokens, **fields)
    engine.close(rid, freeze_at=len(tokens) // 2 * 2)
    engine.step(done_step=engine.num)


# --- retract and resume ---


@pytest.mark.parametrize("crowd", [False, True])
def test_retract_and_resume_gets_its_own_state_back(crowd: bool) -> None:
    # sglang#22493, sglang#35957: the state was dropped, or another request's came back
    engine = recurrent()
    pages = {}
    for rid in (1, 2):
        pages[rid] = opened(engine.run(rid, [rid] * 8)).pages[S]
    engine.step(closes=[Close([ReqId(1), ReqId(2)], "retract")], freeze=None)
    assert opened(engine.open(3, [1] * 9)).prefix_len == 0
    for rid in (4, 5):
        pages[rid] = opened(engine.run(rid, [rid] * 8)).pages[S]
        engine.close(rid, "retract", freeze_at=8)
    if crowd:
        engine.run(6, [6] * 8)
    for rid in (4, 5):
        answer = opened(engine.open(10 + rid, [rid] * 9))
        assert (answer.prefix_len, answer.state_in[S]) == (8, pages[rid])
        assert not set(answer.pages[S]) & set(pages[4] + pages[5])
    check(engine.manager)


# --- one kind's need and another kind's pages ---


def test_a_state_that_is_short_gets_the_bytes_of_text() -> None:
    # sglang#36713: a state allocation failed while text held the bytes
    engine = recurrent(14, high_watermark=0.0)
    for rid in (1, 2, 3):
        engine.run(rid, [rid] * 6, max_new=0)
        engine.close(rid)
    engine.step(done_step=engine.num)
    for rid in (4, 5, 6):
        opened(engine.open(rid, [rid], max_new=0))
        check(engine.manager)
    assert stats_of(engine.manager).evicted_pages[0] > 0


def test_one_kinds_allocation_never_takes_another_kinds_hit() -> None:
    # vllm#42948: allocated before the look-up had locked anything
    engine = recurrent(17, high_watermark=0.0)
    talked(engine, 1, TEXT, max_new=0)
    answer = opened(engine.open(2, [*TEXT, 9], max_new=5))
    assert answer.prefix_len == 8
    assert not set(answer.pages[S]) & set(answer.state_in[S])
    assert engine.reserve(2, 10).no_room is None
    assert stats_of(engine.manager).evicted_pages == [0, 0, 0, 0]
    engine.manager.handle_admin(Flush())
    check(engine.manager)
    assert stats_of(engine.manager).num_checkpoints == 1


def test_joint_capacity_states_and_text_are_asked_for_together() -> None:
    # sglang#36713, tensorrt-llm#14524: each kind fitted alone; live states were left out of the budget
    engine = recurrent(12, high_watermark=0.0)
    large = engine.open(1, [1] * 8, max_new=8).opened[0]
    # 20 tokens: 5 + 4 frames of text, 2 of states, 1 of rings
    assert isinstance(large, TooLarge)
    assert (large.needs, large.frames_needed, large.frames_usable) == ([10, 10, 2, 1], 12, 11)
    opened(engine.open(2, [1] * 8, max_new=4))
    reply = engine.open(3, [3], max_new=0)
    assert (reply.opened, reply.open_no_room is not None) == ([], True)
    assert engine.reserve(2, 16).no_room is None
    check(engine.manager)


def test_every_state_locked_means_no_checkpoint_and_no_failure() -> None:
    # sglang#36770: an assert instead of leaving the checkpoint out
    engine = recurrent(14, high_watermark=0.0)
    talked(engine, 1, TEXT, max_new=0)
    opened(engine.open(2, [*TEXT, 9], max_new=3))
    assert engine.reserve(2, 6).no_room is None
    reply = engine.step(commit=make_commit(2, 10, 10, [9]), freeze=make_freeze(2, 10))
    assert reply.remap_rids == []
    assert stats_of(engine.manager).num_freeze_skipped == 1
    engine.commit(2, 12, tokens=[9, 9])
    check(engine.manager)


# --- what is undone ---


def test_an_open_that_finds_no_room_after_its_hit_undoes_all_of_it() -> None:
    # sglang#29349: ids were accepted, a later check failed on the state, what had changed stayed changed
    engine = recurrent(26, high_watermark=0.0)
    talked(engine, 1, TEXT, max_new=0)
    engine.open(2, [7] * 8, max_new=16)
    before = stats_of(engine.manager)
    reply = engine.open(3, [*TEXT, *[9] * 14], max_new=0)
    assert reply.opened == []
    assert reply.open_no_room is not None
    check(engine.manager)
    after = stats_of(engine.manager)
    assert (after.kinds, after.hit_tokens, after.num_checkpoints) == (before.kinds, before.hit_tokens, 1)
    engine.close(2)
    assert_empty_after_flush(engine)


def test_rollback_over_a_checkpoint_cannot_be_asked_for() -> None:
    # vllm#53505: speculation past an aligned checkpoint was truncated, or corrupted it
    engine = recurrent()
    engine.run(1, TEXT)
    engine.reserve(1, 8)
    # a block of 8 was verified, 3 were accepted: the state may be at 10, never at 12
    reply = engine.send(commit=make_commit(1, 11, 11, [9, 9, 9]), freeze=make_freeze(1, 12))
    assert isinstance(reply, BadRequest)
    engine.step(commit=make_commit(1, 11, 11, [9, 9, 9]), freeze=make_freeze(1, 10))
    assert isinstance(engine.send(commit=make_commit(1, 9, 9, [])), BadRequest)
    engine.reserve(1, 8)
    engine.commit(1, 12, tokens=[8])
    assert opened(engine.open(2, [*TEXT, 9, 9, 9, 7])).prefix_len == 10
    check(engine.manager)


def test_a_chunk_frozen_then_aborted_leaves_its_checkpoint_and_nothing_else() -> None:
    # sglang#37066, sglang-jax#1400: a state handed over at a chunk's end needed a slot that nobody had counted
    engine = recurrent()
    engine.open(1, list(range(20)))
    for length in (4, 8):
        engine.reserve(1, 4)
        engine.step(commit=make_commit(1, length, length, []), freeze=make_freeze(1, length))
    engine.reserve(1, 4)
    engine.close(1, "abort")
    engine.step(done_step=engine.num)
    stats = stats_of(engine.manager)
    assert [(k.num_private, k.num_limbo) for k in stats.kinds] == [(0, 0)] * 4
    assert stats.num_checkpoints == 2
    assert opened(engine.open(2, list(range(30)))).prefix_len == 8
    engine.close(2)
    assert_empty_after_flush(engine)


# --- what is reused ---


def test_reuse_a_prompt_shared_in_part_gets_its_checkpoint_where_it_forks() -> None:
    # vllm#45238: the checkpoint fell into what only one request had, and nobody reused it
    engine = recurrent(120)
    shared = list(range(40, 50))
    talked(engine, 1, [*shared, 1, 2, 3])
    answer = opened(engine.open(2, [*shared, 4, 5, 6]))
    assert (answer.prefix_len, answer.checkpoint_at) == (0, [10, 12])
    engine.reserve(2, 13)
    engine.step(commit=make_commit(2, 10, 10, []), freeze=make_freeze(2, 10))
    assert opened(engine.open(3, [*shared, 7, 8, 9])).prefix_len == 10


def test_starvation_a_recurrent_request_of_the_pools_size_is_filled_to_its_end() -> None:
    # vllm#52520: prefilled to 98.9 %, put back, for ever
    engine = recurrent(13, high_watermark=0.0)
    talked(engine, 1, TEXT, max_new=0)
    prompt = [*TEXT, *range(20, 28)]
    answer = opened(engine.open(2, prompt, max_new=0))
    for length in range(answer.prefix_len + 1, 17):
        assert engine.reserve(2, 4).no_room is None
        edge = length // 2 * 2
        freeze = make_freeze(2, edge) if edge > answer.prefix_len else None
        engine.step(commit=make_commit(2, length, length, []), freeze=freeze)
        check(engine.manager)
    engine.close(2, freeze_at=16)
    engine.step(done_step=engine.num)
    assert opened(engine.open(3, prompt, max_new=0)).prefix_len <= 14


def test_use_after_free_a_checkpoint_that_went_with_its_page_is_not_evicted_again() -> None:
    # tokenspeed#357: a pruned node stayed in the set of those with a state to evict
    engine = recurrent()
    engine.run(1, TEXT)
    engine.freeze(1, 6)
    engine.close(1, freeze_at=8)
    engine.manager.handle_admin(Evict(kind="target_kv", num_pages=4))
    check(engine.manager)
    assert stats_of(engine.manager).num_checkpoints == 0
    engine.manager.handle_admin(Evict(kind="state", num_pages=4))
    talked(engine, 2, TEXT)
    assert stats_of(engine.manager).num_checkpoints == 1
    assert_empty_after_flush(engine)


def test_a_pin_does_not_stop_the_request_whose_text_it_holds() -> None:
    # vllm-ascend#16752: pages pinned for sending could not be exchanged, a check failed
    manager = MemoryManager(make_config(60, list(RECURRENT), pin_budget_frames=10), clock=Clock())
    engine = Engine(manager, kinds=NAMES)
    engine.run(1, TEXT)
    engine.freeze(1, 8)
    assert isinstance(manager.handle_admin(Pin(name="a", tokens=pack_tokens(TEXT), ttl_s=9)), Pinned)
    engine.reserve(1, 4)
    reply = engine.step(commit=make_commit(1, 10, 10, [9, 9]), freeze=make_freeze(1, 10))
    assert len(reply.remap_pages) == 2
    engine.close(1)
    check(manager)


def test_preemption_states_on_their_way_back_are_waited_for() -> None:
    # vllm-ascend#16315: the retry did not count what was coming back, and took everybody
    engine = recurrent(26, high_watermark=0.0)
    engine.run(1, TEXT, max_new=4)
    engine.run(2, [9] * 8, max_new=20)
    assert len(engine.freeze(2, 8).remap_pages) == 2
    engine.reserve(2, 2)
    engine.commit(2, 10, tokens=[9, 9])
    asked = Reserve([ReqId(2)], [18])
    engine.step(done_step=engine.done)
    replies = [engine.step(reserve=asked, done_step=engine.done).no_room]
    engine.done = engine.num
    replies.append(engine.step(reserve=asked, done_step=engine.done).no_room)
    assert [(r.victims, r.waiting_on) if r else None for r in replies] == [([], "limbo"), None]
    check(engine.manager)


@pytest.mark.parametrize("num", range(4, 30, 2))
def test_preemption_the_state_that_a_victim_came_from_counts_as_coming_back(num: int) -> None:
    # vllm-ascend#16315 again: more were preempted than had to be
    engine = recurrent(21, high_watermark=0.0)
    talked(engine, 1, TEXT, max_new=0)
    engine.run(2, [5, 5], max_new=0)
    engine.run(3, [6] * 4, max_new=24)
    assert opened(engine.open(4, [*TEXT, 9], max_new=0)).prefix_len == 8
    asked = Reserve([ReqId(3)], [num])
    no_room = engine.step(reserve=asked).no_room
    if no_room is None:
        return
    engine.close(4, "retract")
    engine.step(done_step=engine.num)
    assert (no_room.victims == [4]) == (engine.step(reserve=asked).no_room is None)
