"""Commit and close: publishing, duplicates, tombstones, windows, draft resets, limbo."""

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import GetStats, KindStats, Match, Matched, Stats
from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.mem import Close, Commit, Opened
from tests.support.mem_builders import DRAFT, TARGET, Engine, check, make_commit, make_manager, windowed

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


def stats_of(manager: MemoryManager) -> list[KindStats]:
    stats = manager.handle_admin(GetStats())
    assert isinstance(stats, Stats)
    return stats.kinds


def valid_from(engine: Engine, rid: int, tokens: list[int]) -> int:
    """draft_valid_from of an open that is closed again."""
    answer = engine.open(rid, tokens).opened[0]
    assert isinstance(answer, Opened)
    engine.close(rid)
    return answer.draft_valid_from


def test_pages_are_published_when_the_length_passes_their_end() -> None:
    engine = Engine(make_manager())
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    for length, in_tree in ((1, 0), (2, 1), (3, 1), (6, 3), (8, 4)):
        engine.commit(1, length)
        assert [(kind.num_tree, kind.num_private) for kind in stats_of(engine.manager)] == [(in_tree, 4 - in_tree)] * 2
        check(engine.manager)


def test_lengths_that_do_not_advance_give_nothing_back() -> None:
    engine = Engine(make_manager())
    engine.open(1, TEXT, max_new=8)
    assert len(engine.reserve(1, 12).grow_pages) == 12
    engine.commit(1, 7)
    reply = engine.reserve(1, 5)
    assert reply.grow_pages == []
    assert len(engine.reserve(1, 6).grow_pages) == 2


def test_a_duplicate_of_a_held_page_is_remapped_and_ours_goes_to_limbo() -> None:
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    engine.open(2, TEXT)
    first = engine.reserve(1, 8)
    engine.reserve(2, 8)
    engine.commit(1, 8)
    reply = engine.commit(2, 8)
    rows = zip(reply.remap_rids, reply.remap_kinds, reply.remap_idxs, reply.remap_pages, strict=True)
    expected = zip(first.grow_kinds, first.grow_idxs, first.grow_pages, strict=True)
    assert set(rows) == {(2, kind, index, page) for kind, index, page in expected}
    assert [kind.num_limbo for kind in stats_of(engine.manager)] == [4, 4]
    check(engine.manager)
    engine.step(done_step=engine.num)
    assert [kind.num_limbo for kind in stats_of(engine.manager)] == [0, 0]


def test_a_duplicate_of_a_page_nobody_holds_takes_its_place() -> None:
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    engine.open(2, TEXT)
    engine.reserve(1, 8)
    engine.reserve(2, 8)
    engine.commit(1, 8)
    engine.close(1)
    before = stats_of(engine.manager)
    reply = engine.commit(2, 8)
    assert reply.remap_rids == []
    after = stats_of(engine.manager)
    assert [(kind.num_tree, kind.num_private) for kind in before] == [(4, 4)] * 2
    assert [(kind.num_tree, kind.num_private) for kind in after] == [(4, 0)] * 2
    check(engine.manager)


def test_a_tombstone_is_filled_by_the_same_request_when_its_draft_catches_up() -> None:
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.commit(1, 8, draft=3)
    assert valid_from(engine, 2, [*TEXT, 9]) == 8
    engine.commit(1, 8, draft=8)
    assert valid_from(engine, 3, [*TEXT, 9]) == 0
    check(engine.manager)


def test_a_tombstone_is_filled_by_another_request_with_the_same_text() -> None:
    engine = Engine(make_manager(40))
    for rid in (1, 2):
        engine.open(rid, TEXT)
        engine.reserve(rid, 8)
    engine.commit(1, 8, draft=0)
    assert set(engine.commit(2, 8).remap_kinds) == {0}
    assert valid_from(engine, 3, [*TEXT, 9]) == 0
    # the first one's own draft pages are duplicates by now
    assert set(engine.commit(1, 8, draft=8).remap_kinds) == {1}
    check(engine.manager)


def test_a_lock_taken_over_a_tombstone_leaves_the_page_that_fills_it_alone() -> None:
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.commit(1, 8, draft=0)
    engine.open(2, [*TEXT, 9])
    engine.commit(1, 8, draft=8)
    engine.close(2)
    check(engine.manager)
    engine.close(1)
    check(engine.manager)


def test_draft_pages_that_start_before_valid_from_are_never_attached() -> None:
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.commit(1, 3, draft=0)
    engine.reset_draft(1)
    engine.commit(1, 8)
    # page 1 straddles token 3; pages 2 and 3 are whole
    assert valid_from(engine, 2, [*TEXT, 9]) == 4
    check(engine.manager)


def test_the_page_in_which_a_draft_was_reset_is_not_attached_either() -> None:
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.commit(1, 2)
    engine.commit(1, 3)
    engine.reset_draft(1)
    engine.commit(1, 4)
    engine.commit(1, 8)
    assert valid_from(engine, 2, [*TEXT, 9]) == 4
    check(engine.manager)


def test_reset_draft_replaces_the_tail_in_the_same_reply() -> None:
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    granted = engine.reserve(1, 8)
    engine.commit(1, 5)
    old = [page for kind, page in zip(granted.grow_kinds, granted.grow_pages, strict=True) if kind == 1]
    reply = engine.reset_draft(1)
    rows = list(zip(reply.remap_rids, reply.remap_kinds, reply.remap_idxs, strict=True))
    assert rows == [(1, 1, 2), (1, 1, 3)]
    assert not set(reply.remap_pages) & set(old)
    kinds = stats_of(engine.manager)
    assert (kinds[1].num_tree, kinds[1].num_limbo, kinds[1].num_private) == (2, 2, 2)
    check(engine.manager)


def test_reset_draft_without_room_reads_0_until_a_reservation_fills_it() -> None:
    engine = Engine(make_manager(8))
    engine.open(1, TEXT, max_new=0)
    engine.reserve(1, 12)
    engine.open(2, [9], max_new=0)
    # the elder holds 6 + 6 pages, 3 + 2 of 7 frames; this one the other two
    engine.reserve(2, 4)
    reply = engine.reset_draft(2)
    assert reply.remap_pages == [0, 0]
    assert engine.reserve(2, 4).no_room is not None
    assert "no draft pages from token 0 on" in str(engine.send(commit=make_commit(2, 1, 1, [])))
    check(engine.manager)
    engine.step(done_step=engine.num)
    filled = engine.reserve(2, 4)
    assert filled.no_room is None
    assert len(filled.remap_pages) == 2
    engine.commit(2, 1)
    check(engine.manager)


def test_draft_joining_later_gets_its_pages_by_reset_draft() -> None:
    manager = make_manager(40)
    engine = Engine(manager, kinds=("target_kv",))
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.commit(1, 5, draft=0)
    Engine(manager, role="draft", kinds=("draft_kv",))
    reply = engine.reset_draft(1)
    assert list(zip(reply.remap_kinds, reply.remap_idxs, strict=True)) == [(1, 2), (1, 3)]
    assert set(engine.reserve(1, 5).grow_kinds) == {0, 1}
    check(manager)


def test_pages_below_the_window_are_given_up_while_running() -> None:
    engine = Engine(make_manager(40, [TARGET, windowed(DRAFT, 4)]))
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.commit(1, 4, draft=0)
    engine.commit(1, 8, draft=0)
    kinds = stats_of(engine.manager)
    assert (kinds[1].num_private, kinds[1].num_limbo, kinds[1].num_tree) == (2, 2, 0)
    check(engine.manager)
    engine.open(2, [9] * 8)
    engine.reserve(2, 8)
    engine.commit(2, 8)
    kinds = stats_of(engine.manager)
    assert kinds[1].num_tree == 4
    check(engine.manager)
    engine.close(2)
    check(engine.manager)


def test_close_keeps_what_is_full_and_frees_the_rest_through_limbo() -> None:
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    reply = engine.step(commit=make_commit(1, 5, 5, []), closes=[Close([ReqId(1)], "abort")], done_step=1)
    assert reply.remap_rids == []
    kinds = stats_of(engine.manager)
    assert [(kind.num_tree, kind.num_limbo) for kind in kinds] == [(2, 2), (2, 2)]
    engine.step(done_step=2)
    assert [kind.num_limbo for kind in stats_of(engine.manager)] == [2, 2]
    engine.step(done_step=3)
    assert [kind.num_limbo for kind in stats_of(engine.manager)] == [0, 0]
    matched = engine.manager.handle_admin(Match(tokens=pack_tokens(TEXT)))
    assert matched == Matched(prefix_len=4, draft_valid_from=0)
    check(engine.manager)


def test_a_request_remapped_and_closed_by_one_step_is_not_in_its_reply() -> None:
    engine = Engine(make_manager(40))
    for rid in (1, 2, 3):
        engine.open(rid, TEXT)
        engine.reserve(rid, 8)
    engine.commit(1, 8)
    rids = [ReqId(2), ReqId(3)]
    commit = Commit(rids=rids, target_lens=[8, 8], draft_lens=[8, 8], tokens=[b"", b""])
    reply = engine.step(commit=commit, closes=[Close([ReqId(2)])])
    assert set(reply.remap_rids) == {3}
    check(engine.manager)


def test_answers_of_one_conversation_are_found_by_the_next_turn() -> None:
    engine = Engine(make_manager(40))
    engine.run(1, TEXT, max_new=8)
    engine.reserve(1, 6)
    engine.commit(1, 13, tokens=[20, 21, 22, 23, 24])
    engine.close(1)
    turn = [*TEXT, 20, 21, 22, 23, 24, 30]
    assert engine.open(2, turn).opened[0].prefix_len == 12  # type: ignore[union-attr]
