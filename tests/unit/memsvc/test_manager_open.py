"""Opening: hits, refusals, per-request kinds, namespaces."""

import pytest

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import GetStats, Stats
from memsvc.wire.base import BadRequest, ReqId, pack_tokens
from memsvc.wire.mem import NoRoom, Opened, OpenReq, Stepped, TooLarge
from tests.support.mem_builders import (
    DRAFT,
    RING,
    STATE,
    TARGET,
    Clock,
    Engine,
    check,
    make_config,
    make_manager,
    windowed,
)

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


def opened(reply: Stepped) -> Opened:
    assert isinstance(reply.opened[0], Opened), reply
    return reply.opened[0]


def test_the_last_prompt_token_is_never_served_from_cache() -> None:
    engine = Engine(make_manager())
    engine.run(1, TEXT)
    for length, expected in ((8, 6), (7, 6), (9, 8), (3, 2), (2, 0), (1, 0)):
        reply = engine.open(10 + length, [*TEXT, 9][:length])
        assert opened(reply).prefix_len == expected
    check(engine.manager)


def test_a_hit_lists_the_pages_of_every_token_kind() -> None:
    engine = Engine(make_manager())
    engine.open(1, TEXT)
    granted = engine.reserve(1, 8)
    engine.commit(1, 8)
    hit = opened(engine.open(2, [*TEXT, 9]))
    for kind in (0, 1):
        rows = zip(granted.grow_kinds, granted.grow_pages, strict=True)
        assert hit.pages[kind] == [page for k, page in rows if k == kind]
    assert hit.draft_valid_from == 0
    assert hit.checkpoint_at == []


def test_the_draft_hit_is_the_longest_run_before_the_end_within_the_window() -> None:
    engine = Engine(make_manager(40, [TARGET, windowed(DRAFT, 4)]))
    engine.run(1, TEXT)
    hit = opened(engine.open(2, [*TEXT, 9]))
    assert hit.draft_valid_from == 4
    assert hit.pages[1][:2] == [0, 0]
    assert 0 not in hit.pages[1][2:]
    check(engine.manager)


def test_tombstones_cut_the_draft_hit_short_and_are_counted() -> None:
    engine = Engine(make_manager())
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.commit(1, 8, draft=4)
    hit = opened(engine.open(2, [*TEXT, 9]))
    assert (hit.prefix_len, hit.draft_valid_from) == (8, 8)
    assert hit.pages[1] == [0, 0, 0, 0]
    stats = engine.manager.handle_admin(GetStats())
    assert isinstance(stats, Stats)
    assert stats.draft_hit_short == 1
    assert (stats.hit_tokens, stats.queried_tokens) == (8, 17)


def test_salt_and_model_separate_namespaces() -> None:
    manager = make_manager(40)
    engine = Engine(manager)
    engine.run(1, TEXT, salt="a")
    assert opened(engine.open(2, TEXT, salt="b")).prefix_len == 0
    assert opened(engine.open(3, TEXT, salt="a")).prefix_len == 6
    same, other = Engine(manager, name="same"), Engine(manager, name="other", fingerprint="elsewhere")
    assert opened(same.open(2, TEXT, salt="a")).prefix_len == 6
    assert opened(other.open(2, TEXT, salt="a")).prefix_len == 0
    check(manager)


def test_draft_pages_of_another_draft_model_are_not_used() -> None:
    manager = make_manager(40)
    engine = Engine(manager, kinds=("target_kv",))
    Engine(manager, role="draft", kinds=("draft_kv",), fingerprint="draft 1")
    engine.run(1, TEXT)
    assert opened(engine.open(2, [*TEXT, 9])).draft_valid_from == 0
    Engine(manager, role="draft", kinds=("draft_kv",), fingerprint="draft 2")
    assert opened(engine.open(3, [*TEXT, 9])).draft_valid_from == 8
    check(manager)


def test_a_namespace_takes_draft_pages_of_one_draft_model_only() -> None:
    manager = make_manager(40)
    engine = Engine(manager, kinds=("target_kv",))
    draft = Engine(manager, role="draft", kinds=("draft_kv",), fingerprint="draft 1")
    engine.run(1, TEXT)
    draft.fingerprint = "draft 2"
    draft.register()
    engine.open(2, [9] * 8)
    engine.reserve(2, 8)
    for length in (2, 4, 8):
        engine.commit(2, length)
    draft.fingerprint = "draft 1"
    draft.register()
    assert opened(engine.open(3, [9] * 9)).draft_valid_from == 8
    assert opened(engine.open(4, [*TEXT, 9])).draft_valid_from == 0
    check(manager)


def test_an_engine_without_a_draft_holds_no_draft_pages() -> None:
    engine = Engine(make_manager(), kinds=("target_kv",))
    engine.open(1, TEXT)
    assert set(engine.reserve(1, 8).grow_kinds) == {0}
    engine.commit(1, 8, draft=0)
    check(engine.manager)


def test_per_request_kinds_are_taken_at_open_and_freed_through_limbo() -> None:
    manager = make_manager(20, [TARGET, DRAFT, STATE, RING])
    engine = Engine(manager, kinds=("target_kv", "draft_kv", "state", "ring"))
    reply = engine.open(1, TEXT)
    assert [len(pages) for pages in opened(reply).pages] == [0, 0, 2, 1]
    assert {(k, p) for k, p in zip(reply.clear_kinds, reply.clear_pages, strict=True) if k >= 2} == {
        (kind, page) for kind in (2, 3) for page in opened(reply).pages[kind]
    }
    check(manager)
    engine.step(closes=[], done_step=0)
    engine.close(1)
    stats = manager.handle_admin(GetStats())
    assert isinstance(stats, Stats)
    assert [kind.num_limbo for kind in stats.kinds] == [0, 0, 2, 1]
    check(manager)


def test_a_recurrent_model_has_no_hit_without_a_stored_state() -> None:
    engine = Engine(make_manager(20, [TARGET, DRAFT, STATE, RING]), kinds=("target_kv", "draft_kv", "state"))
    engine.run(1, TEXT)
    assert opened(engine.open(2, [*TEXT, 9])).prefix_len == 0


def test_too_large_says_what_is_needed_and_goes_on_to_the_next() -> None:
    engine = Engine(make_manager(8))
    reply = engine.step(
        opens=[OpenReq(ReqId(1), pack_tokens(TEXT), max_new=12), OpenReq(ReqId(2), pack_tokens([1]), max_new=2)]
    )
    large, small = reply.opened
    # 8 + 12 + 4 tokens are 12 pages of each kind: 6 and 4 frames of 7
    assert large == TooLarge(rid=ReqId(1), needs=[12, 12], usable=[14, 21], frames_needed=10, frames_usable=7)
    assert isinstance(small, Opened)
    assert reply.open_no_room is None


def test_pin_budget_exchange_and_shared_weights_are_no_room_for_requests() -> None:
    engine = Engine(make_manager(13, pin_budget_frames=2, exchange_bytes=1600, shared_bytes=1536))
    layout = engine.manager.layout
    assert (layout.exchange_offset, layout.shared_offset) == (1536, 3 * 1536)
    large = engine.open(1, TEXT, max_new=12).opened[0]
    assert isinstance(large, TooLarge)
    assert large.frames_usable == 13 - 1 - 2 - 1 - 2


def test_a_request_as_large_as_the_pool_opens_and_finishes_in_a_pool_full_of_cache() -> None:
    engine = Engine(make_manager(11))
    engine.run(1, list(range(8)), max_new=0)
    engine.close(1)
    assert isinstance(engine.open(2, [50], max_new=19).opened[0], Opened)
    for length in range(1, 24):
        engine.reserve(2, 1)
        engine.commit(2, length, tokens=[51])
        check(engine.manager)


def test_opens_stop_at_the_first_that_does_not_fit() -> None:
    engine = Engine(make_manager(11))
    engine.open(1, TEXT, max_new=0)
    ops = [OpenReq(ReqId(rid), pack_tokens([rid] * 8), max_new=0) for rid in (2, 3)]
    reply = engine.step(opens=[*ops, OpenReq(ReqId(4), pack_tokens([4]), max_new=0)])
    # the elder keeps 6 pages of each kind (prompt and slack); 4 more make 5 + 4 of 10 frames, 8 more 7 + 5
    assert [answer.rid for answer in reply.opened] == [2]
    assert isinstance(reply.open_no_room, NoRoom)
    assert reply.open_no_room.needs == [4, 4]
    check(engine.manager)


def test_prompts_that_were_admitted_but_not_filled_count_against_the_next() -> None:
    engine = Engine(make_manager(20))
    admitted = 0
    for rid in range(1, 9):
        reply = engine.open(rid, [rid] * 8, max_new=0)
        admitted += len(reply.opened)
    granted = [engine.reserve(rid, 8).no_room for rid in range(1, admitted + 1)]
    assert admitted > 2
    assert granted == [None] * admitted
    assert admitted < 8


def test_an_open_that_is_refused_leaves_nothing_behind() -> None:
    engine = Engine(make_manager(11))
    engine.run(1, TEXT, max_new=0)
    engine.run(2, [5] * 8, max_new=0)
    before = check(engine.manager), engine.manager.handle_admin(GetStats())
    reply = engine.open(3, [*TEXT, *[9] * 8], max_new=0)
    assert reply.open_no_room is not None
    after = check(engine.manager), engine.manager.handle_admin(GetStats())
    assert before[0] == after[0]
    assert isinstance(after[1], Stats)
    assert isinstance(before[1], Stats)
    assert before[1].kinds == after[1].kinds


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (OpenReq(ReqId(5), b"", 4), "0 bytes"),
        (OpenReq(ReqId(5), b"abc", 4), "3 bytes"),
        (OpenReq(ReqId(5), pack_tokens([1]), -1), "max_new -1"),
        (OpenReq(ReqId(1), pack_tokens([1]), 1), "rid 1 is open already"),
    ],
)
def test_a_bad_open_is_refused_and_its_number_stays_free(op: OpenReq, text: str) -> None:
    engine = Engine(make_manager())
    engine.open(1, TEXT)
    reply = engine.send(opens=[op])
    assert isinstance(reply, BadRequest)
    assert text in reply.reason
    engine.step()


def test_a_hit_that_lies_in_too_many_frames_is_shortened_for_a_request_alone() -> None:
    # Each short text leaves its only target page in a frame of its own beside a longer-lived one.
    manager = MemoryManager(make_config(9, high_watermark=0.0), clock=Clock())
    engine = Engine(manager)
    engine.open(1, [1, 1, 1, 1, 1], max_new=0)
    engine.open(2, [2, 2, 2, 2, 2], max_new=0)
    for length in (2, 4):
        for rid in (1, 2):
            engine.reserve(rid, 2)
            engine.commit(rid, length)
    for rid in (1, 2):
        engine.close(rid)
    engine.step()
    hit = opened(engine.open(3, [1] * 5, max_new=9))
    assert hit.prefix_len in (0, 2, 4)
    for length in range(hit.prefix_len + 1, 18):
        assert engine.reserve(3, 1).no_room is None
        engine.commit(3, length, tokens=[7])
        check(manager)
