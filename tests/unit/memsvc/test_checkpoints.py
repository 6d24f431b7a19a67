"""Frozen states in the tree: how they come to be, and when not."""

import pytest

from memsvc.wire.base import BadRequest, ReqId
from memsvc.wire.mem import Freeze
from tests.support.mem_asks import committed, frozen, moved, num_checkpoints, opened, recurrent, state_len
from tests.support.mem_builders import (
    RECURRENT,
    Engine,
    check,
    make_commit,
    make_freeze,
    make_manager,
    stats_of,
)

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]
S = 2
"""Number of the kind of state."""


# --- how they come to be ---


def test_a_running_request_exchanges_its_pages_against_new_ones() -> None:
    engine = recurrent()
    pages = committed(engine, 1, TEXT)
    reply = engine.freeze(1, 6)
    new = moved(reply)
    assert len(set(new + pages)) == 4
    assert {p for k, p in zip(reply.clear_kinds, reply.clear_pages, strict=True) if k == S} == set(new)
    assert num_checkpoints(engine) == 1
    assert opened(engine.open(2, TEXT)).state_in == [[], [], pages, []]
    engine.close(1)
    limbo = [kind.num_limbo for kind in stats_of(engine.manager).kinds]
    assert limbo[S] == 2


def test_a_request_that_closes_gives_its_pages_away_even_without_room() -> None:
    # with 4 more slots the request needs 3 + 2 frames for text, 2 for its state and 1 for its ring: 8 of 9
    engine = recurrent(10)
    committed(engine, 1, TEXT, max_new=0)
    assert moved(engine.freeze(1, 8)) == []
    reply = engine.close(1, freeze_at=8)
    assert (reply.remap_rids, num_checkpoints(engine)) == ([], 1)
    assert [kind.num_limbo for kind in stats_of(engine.manager).kinds][S] == 0
    assert state_len(engine.manager, TEXT) == 8


def test_the_pages_that_were_exchanged_are_those_that_the_next_freeze_stores() -> None:
    engine = recurrent()
    committed(engine, 1, TEXT)
    second = moved(engine.freeze(1, 4))
    third = moved(engine.freeze(1, 6))
    engine.close(1, freeze_at=8)
    assert opened(engine.open(2, TEXT)).state_in[S] == second
    assert opened(engine.open(3, [*TEXT, 9])).state_in[S] == third


@pytest.mark.parametrize("reason", ["finish", "abort", "retract"])
def test_every_way_to_close_can_leave_the_state_behind(reason: str) -> None:
    engine = recurrent()
    committed(engine, 1, TEXT)
    engine.close(1, reason, freeze_at=8)
    assert opened(engine.open(2, [*TEXT, 9])).prefix_len == 8


def test_where_a_checkpoint_is_already_the_request_keeps_its_pages() -> None:
    engine = recurrent()
    first = committed(engine, 1, TEXT)
    second = committed(engine, 2, TEXT)
    reply = engine.step(freeze=Freeze([ReqId(1), ReqId(2)], [8, 8]))
    assert reply.remap_rids == [1, 1]
    assert num_checkpoints(engine) == 1
    assert moved(engine.freeze(2, 8)) == []
    engine.close(2, freeze_at=8)
    assert opened(engine.open(3, [*TEXT, 9])).state_in[S] == first
    engine.step()
    engine.step()
    assert [kind.num_limbo for kind in stats_of(engine.manager).kinds] == [0, 0, 0, 0]
    check(engine.manager)
    assert second != first


def test_a_freeze_without_room_is_skipped_and_the_request_goes_on() -> None:
    engine = recurrent(12)
    committed(engine, 1, TEXT, max_new=2)
    assert moved(engine.freeze(1, 8)) == []
    stats = stats_of(engine.manager)
    assert (stats.num_freeze_skipped, stats.num_frozen, stats.num_checkpoints) == (1, 0, 0)
    assert engine.reserve(1, 6).no_room is None
    engine.commit(1, 10, tokens=[1, 2])
    check(engine.manager)


def test_a_freeze_takes_nothing_that_the_elder_was_promised() -> None:
    engine = recurrent(20)
    committed(engine, 1, TEXT, max_new=8)
    committed(engine, 2, [9] * 8, max_new=0)
    # the elder may come to 10 + 10 pages: with 4 + 4, four states and two rings 17 of 19 frames are taken
    froze = []
    for length in (2, 4, 6, 8):
        froze.append(len(moved(engine.freeze(2, length))))
        check(engine.manager)
    assert froze == [2, 0, 0, 0]
    assert engine.reserve(1, 12).no_room is None


def test_no_exchange_while_opens_are_paused_for_want_of_room() -> None:
    engine = recurrent(26, high_watermark=1.0)
    committed(engine, 1, TEXT, max_new=8)
    committed(engine, 2, [9] * 8, max_new=24)
    assert engine.reserve(2, 24).no_room is not None
    assert moved(engine.freeze(1, 8)) == []
    assert stats_of(engine.manager).num_freeze_skipped == 1


def test_a_freeze_past_the_quota_is_skipped() -> None:
    engine = recurrent(60, engine_quota_frames={"e": 12})
    committed(engine, 1, TEXT, max_new=0)
    committed(engine, 2, [9] * 4, max_new=0)
    # the elder counts with 6 + 6 pages, the other has 2 + 2: 4 + 3 frames, 4 of states, 1 of rings
    assert moved(engine.freeze(2, 4)) == []
    engine.close(1)
    assert len(moved(engine.freeze(2, 4))) == 2


@pytest.mark.parametrize(
    ("freeze", "text"),
    [
        (make_freeze(1, 5), "rid 1 at 5 tokens; it has to be a multiple of 2 above 4"),
        (make_freeze(1, 4), "above 4, where its state comes from"),
        (make_freeze(1, 2), "above 4"),
        (make_freeze(1, 10), "at most 8, which are committed"),
        (make_freeze(1, 0), "at 0 tokens"),
        (make_freeze(1, -2), "at -2 tokens"),
        (make_freeze(9, 6), "freeze: rid 9 is not open"),
        (Freeze([ReqId(1)] * 2, [6, 6]), "2 rids, 1 different, 2 lens"),
        (Freeze([ReqId(1)], []), "1 rids, 1 different, 0 lens"),
    ],
)
def test_a_wrong_freeze_changes_nothing_and_says_what_is_wrong(freeze: Freeze, text: str) -> None:
    engine = recurrent()
    frozen(engine, 1, TEXT[:4], 4)
    opened(engine.open(1, [*TEXT, 9]))
    engine.reserve(1, 4)
    engine.step(commit=None)
    before = num_checkpoints(engine)
    reply = engine.send(freeze=freeze)
    if "8, which" in text:
        engine.commit(1, 5)
        reply = engine.send(freeze=freeze, commit=make_commit(1, 8, 8, []))
    assert isinstance(reply, BadRequest)
    assert text in reply.reason
    assert num_checkpoints(engine) == before
    engine.step(commit=make_commit(1, 8, 8, []), freeze=make_freeze(1, 8))


def test_an_engine_without_a_kind_of_state_cannot_freeze() -> None:
    manager = make_manager(40, list(RECURRENT))
    engine = Engine(manager)
    engine.run(1, TEXT)
    reply = engine.send(freeze=make_freeze(1, 8))
    assert isinstance(reply, BadRequest)
    assert "rid 1 is of an engine without a kind of state" in reply.reason
    answer = opened(engine.open(2, [*TEXT, 9]))
    assert (answer.prefix_len, answer.state_in, answer.checkpoint_at) == (8, [], [])


def test_a_state_is_frozen_at_a_length_that_the_same_step_commits() -> None:
    engine = recurrent()
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    assert len(moved(engine.step(commit=make_commit(1, 8, 8, []), freeze=make_freeze(1, 8)))) == 2
    assert state_len(engine.manager, TEXT) == 8
