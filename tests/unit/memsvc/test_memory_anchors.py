"""Sequences that broke the memory management of other engines, each played through on ours: text and draft pages.

Every test is named for the kind of failure, and its comment names the report (repository#number) it comes
from. Here: tails, frees, page
edges and locks; room and deaths are in test_memory_anchors_room, recurrent states in
test_memory_anchors_states. Sequences that need what this service does
not have (moving pages, transfers between hosts, kernels, threads) are left out.
"""

from memsvc.core.config import PoolConfig
from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import Evict, Flush
from memsvc.wire.base import BadRequest, ReqId
from memsvc.wire.mem import Close, KindSpec, Reserve
from tests.support.mem_asks import assert_empty_after_flush, cached, opened, pages
from tests.support.mem_builders import (
    DRAFT,
    TARGET,
    Clock,
    Engine,
    check,
    make_commit,
    make_config,
    make_manager,
    stats_of,
    windowed,
)

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


# --- tail leaks ---


def test_tail_leak_rejected_drafts_reuse_their_slots_for_ever() -> None:
    # sglang#13826, sglang#7112: rejected tokens of a paged block were allocated anew each step
    kinds = [KindSpec("target_kv", 768, 16), KindSpec("draft_kv", 512, 16)]
    manager = MemoryManager(PoolConfig(arena_bytes=16 * 1536, page_size=16, kinds=kinds, slack_tokens=27))
    engine = Engine(manager)
    engine.run(1, [1] * 20, max_new=40)
    for length in range(21, 60):
        engine.reserve(1, 18)
        engine.commit(1, length, tokens=[7])
        assert pages(manager, "private") == [-(-(length + 17) // 16) - length // 16] * 2
    engine.close(1)
    assert_empty_after_flush(engine)


def test_tail_leak_a_chunk_inserted_then_aborted_leaves_only_full_pages() -> None:
    # sglang-jax#1400: an unfinished chunked request kept its row for ever
    engine = Engine(make_manager(40))
    engine.open(1, list(range(20)))
    engine.reserve(1, 7)
    engine.commit(1, 7)
    engine.reserve(1, 7)
    engine.close(1, "abort")
    engine.step(done_step=engine.num)
    assert (pages(engine.manager, "private"), pages(engine.manager, "tree")) == ([0, 0], [3, 3])
    assert_empty_after_flush(engine)


def test_tail_leak_a_long_prompt_in_chunks_takes_each_page_once() -> None:
    # sglang#36855: each chunk allocated the whole prompt again
    engine = Engine(make_manager(40))
    engine.open(1, list(range(30)), max_new=0)
    taken: list[tuple[int, int]] = []
    for length in range(5, 31, 5):
        grown = engine.reserve(1, 5)
        taken += zip(grown.grow_kinds, grown.grow_pages, strict=True)
        engine.commit(1, length)
    assert len(taken) == len(set(taken)) == 30
    check(engine.manager)


def test_tail_leak_what_was_granted_and_not_used_comes_back_at_close() -> None:
    # sglang#35204: what came back was counted by ids handed over, not by the length that was handled
    engine = Engine(make_manager(40))
    engine.open(1, TEXT, max_new=8)
    engine.reserve(1, 16)
    engine.step(commit=make_commit(1, 5, 3, [9, 9, 9]), closes=[Close([ReqId(1)])])
    engine.step(done_step=engine.num)
    assert (pages(engine.manager, "tree"), pages(engine.manager, "limbo")) == ([2, 1], [0, 0])
    assert cached(engine.manager, TEXT) == 4
    assert_empty_after_flush(engine)


# --- double frees ---


def test_double_free_a_request_that_ends_by_two_paths_ends_once() -> None:
    # sglang-jax#982: finish and abort under overlap freed the last slot twice
    engine = Engine(make_manager(40))
    engine.run(1, [*TEXT, 9])
    twice = [Close([ReqId(1)], "finish"), Close([ReqId(1)], "abort")]
    assert isinstance(engine.send(closes=twice), BadRequest)
    engine.close(1)
    assert isinstance(engine.send(closes=[Close([ReqId(1)], "abort")]), BadRequest)
    assert pages(engine.manager, "limbo") == [1, 1]
    assert_empty_after_flush(engine)


def test_double_free_a_repeated_step_frees_nothing_again() -> None:
    # the same by a lost reply: sglang-jax#982
    engine = Engine(make_manager(40))
    engine.run(1, [*TEXT, 9])
    first = engine.close(1)
    engine.num -= 1
    assert engine.step(closes=[Close([ReqId(1)])], done_step=engine.done) == first
    assert pages(engine.manager, "limbo") == [1, 1]


def test_late_completion_pages_wait_for_the_step_and_then_come_back() -> None:
    # dynamo#3730, dynamo#4171: the slot was removed before a late completion, its blocks were never freed
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.step(closes=[Close([ReqId(1)])], done_step=0)
    closed = engine.num
    engine.step(done_step=closed - 1)
    assert pages(engine.manager, "limbo") == [4, 4]
    engine.step(done_step=closed)
    assert pages(engine.manager, "limbo") == [0, 0]
    assert_empty_after_flush(engine)


# --- page edges ---


def test_page_edge_a_page_that_is_still_written_is_never_in_the_tree() -> None:
    # sglang#35270, sglang#35470: a page under rewriting was inserted each step, and two nodes had it
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    for length in range(1, 9):
        engine.commit(1, length)
        assert cached(engine.manager, TEXT) == length // 2 * 2
        assert pages(engine.manager, "tree") == [length // 2] * 2


def test_page_edge_a_page_shared_in_part_is_not_shared() -> None:
    # tensorrt-llm#12306: a partial block was rebased onto a shared page and overwritten
    engine = Engine(make_manager(40))
    engine.run(1, TEXT)
    answer = opened(engine.open(2, [1, 2, 3, 9, 9]))
    assert (answer.prefix_len, len(answer.pages[0])) == (2, 1)
    grown = engine.reserve(2, 3)
    other = opened(engine.open(3, [*TEXT, 9]))
    held = {(kind, page) for kind in (0, 1) for page in other.pages[kind]}
    assert not held & set(zip(grown.grow_kinds, grown.grow_pages, strict=True))


def test_page_edge_a_reservation_names_the_whole_of_its_last_page() -> None:
    # sglang#35401: only the requested part of the last page was written to the row; the rest was the last tenant's
    engine = Engine(make_manager(40))
    engine.run(1, TEXT)
    engine.close(1)
    engine.step(done_step=engine.num)
    engine.manager.handle_admin(Flush())
    engine.open(2, [9] * 5)
    grown = engine.reserve(2, 5)
    assert grown.grow_idxs == [0, 1, 2] * 2
    assert engine.reserve(2, 6).grow_pages == []
    assert 0 not in grown.grow_pages


def test_page_edge_a_reserve_past_the_limit_is_refused_not_clamped() -> None:
    # sglang#26972: a reserve longer than the row was cut silently, and writes went to the next row
    engine = Engine(make_manager(40))
    engine.open(1, TEXT, max_new=2)
    assert isinstance(engine.send(reserve=Reserve([ReqId(1)], [15])), BadRequest)
    assert len(engine.reserve(1, 14).grow_pages) == 14
    assert isinstance(engine.send(commit=make_commit(1, 15, 15, [9] * 7)), BadRequest)


def test_a_hit_may_end_where_other_texts_go_on() -> None:
    # tensorrt-llm#699: reuse expected a leaf and found children
    engine = Engine(make_manager(60))
    engine.run(1, TEXT)
    engine.run(2, [*TEXT, 20, 21])
    engine.run(3, [*TEXT, 30, 31])
    for rid, tokens in ((4, [*TEXT, 9]), (5, [*TEXT[:6], 9])):
        assert opened(engine.open(rid, tokens)).prefix_len == len(tokens) - 1
    check(engine.manager)


# --- tombstones ---


def test_tombstone_an_insert_over_it_frees_nobodys_page() -> None:
    # sglang#27586: an insert overlapped a tombstone with a stale map, and a live window slot was freed
    engine = Engine(make_manager(60))
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.commit(1, 8, draft=2)
    answer = opened(engine.open(2, [*TEXT, 9, 9]))
    engine.reserve(2, 2)
    engine.open(3, TEXT, salt="x")
    engine.reserve(3, 8)
    assert answer.draft_valid_from == 8
    engine.commit(1, 8, draft=8)
    engine.commit(2, 10)
    assert (pages(engine.manager, "private"), pages(engine.manager, "tree")) == ([4, 4], [5, 5])
    engine.step(closes=[Close([ReqId(1), ReqId(2), ReqId(3)])])
    assert_empty_after_flush(engine)


def test_lock_imbalance_windows_over_a_long_shared_prefix() -> None:
    # sglang#24153: a window's unlock met a node whose count was 0
    manager = MemoryManager(make_config(80, [TARGET, windowed(DRAFT, 4)]), clock=Clock())
    engine = Engine(manager)
    text = list(range(24))
    engine.run(1, text)
    for rid, length in ((2, 24), (3, 16), (4, 20)):
        opened(engine.run(rid, [*text[:length], 90 + rid, 91, 92]))
        check(manager)
    manager.handle_admin(Evict(kind="draft_kv", num_pages=5))
    for rid in (3, 1, 4, 2):
        engine.close(rid)
        check(manager)
    assert_empty_after_flush(engine)


def test_accounting_pages_of_a_window_never_exceed_their_bound() -> None:
    # sglang#27789: speculation, large pages and a sliding window were off by one page
    manager = MemoryManager(make_config(60, [TARGET, windowed(DRAFT, 4)], max_extend_tokens=6), clock=Clock())
    engine = Engine(manager)
    engine.open(1, TEXT, max_new=40)
    for length in range(1, 48):
        engine.reserve(1, 6)
        engine.commit(1, length, tokens=[9] if length > 8 else [])
        [target, draft] = stats_of(manager).kinds
        held = sum(bool(page) for page in manager._steps.opening._running.elder.tables[1])  # type: ignore[union-attr]
        assert held <= 2 + 3 + 1
        assert target.num_private + draft.num_private <= 8
        check(manager)


def test_lock_imbalance_eviction_leaves_the_counts_of_pages_in_use() -> None:
    # atlas#373: eviction zeroed the count of a page that a sequence still used
    engine = Engine(make_manager(40))
    engine.run(1, TEXT)
    engine.open(2, [*TEXT, 9])
    engine.manager.handle_admin(Flush())
    engine.close(1)
    engine.manager.handle_admin(Flush())
    assert cached(engine.manager, TEXT) == 8
    engine.close(2)
    assert_empty_after_flush(engine)


def test_lock_imbalance_looking_up_holds_nothing() -> None:
    # sglang#40360: an abort between look-up and load left locks behind
    engine = Engine(make_manager(40))
    engine.run(1, TEXT)
    engine.close(1)
    for _ in range(3):
        assert cached(engine.manager, TEXT) == 8
    assert_empty_after_flush(engine)
