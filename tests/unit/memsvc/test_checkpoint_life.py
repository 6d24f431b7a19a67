"""How long a frozen state stays: who holds it, what thins it out, what evicts it, and what moves it about."""

from typing import Any

import pytest

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import Evict, Evicted, Flush, Match, Matched, Snapshot, SnapshotReport
from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.mem import Close, Opened, OpenReq
from tests.support.mem_builders import NAMES, RECURRENT, Clock, Engine, check, make_commit, make_config, stats_of

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


class Rig:
    """One recurrent engine, with a clock, and a pool of 150 frames unless it says otherwise."""

    def __init__(self, num_frames: int = 150, **config: Any) -> None:
        self.clock = Clock()
        self.manager = MemoryManager(make_config(num_frames, list(RECURRENT), **config), clock=self.clock)
        self.engine = Engine(self.manager, kinds=NAMES)
        self.next_rid = 1

    def opened(self, tokens: list[int], **fields: Any) -> Opened:
        """A new request, opened."""
        self.next_rid += 1
        [answer] = self.engine.open(self.next_rid, tokens, **fields).opened
        assert isinstance(answer, Opened)
        return answer

    def talk(self, tokens: list[int], *lens: int, closed: bool = True) -> int:
        """A request that commits tokens page by page and freezes its state at lens, a second later than the last."""
        self.clock.now += 1
        answer = self.opened(tokens)
        rid, engine = answer.rid, self.engine
        engine.reserve(rid, len(tokens) - answer.prefix_len)
        for length in range(answer.prefix_len + 2, len(tokens) + 1, 2):
            engine.commit(rid, length)
            if length in lens:
                assert engine.freeze(rid, length).remap_rids
        if closed:
            engine.close(rid)
        check(self.manager)
        return rid

    def places(self, tokens: list[int]) -> list[int]:
        """Lengths at which there is a checkpoint of these tokens."""
        found, length = [], len(tokens)
        while length:
            matched = self.manager.handle_admin(Match(tokens=pack_tokens(tokens[:length])))
            assert isinstance(matched, Matched)
            length = matched.state_len
            found += [length] if length else []
            length = max(0, length - 1)
        return found[::-1]

    def evict(self, num: int, kind: str = "state") -> list[int]:
        """Pages that went, by kind."""
        evicted = self.manager.handle_admin(Evict(kind=kind, num_pages=num))
        assert isinstance(evicted, Evicted)
        check(self.manager)
        return evicted.num_pages

    def cached(self, tokens: list[int]) -> int:
        """Tokens of target pages."""
        matched = self.manager.handle_admin(Match(tokens=pack_tokens(tokens)))
        assert isinstance(matched, Matched)
        return matched.prefix_len

    def num_nodes(self) -> int:
        """Nodes of the tree."""
        report = self.manager.handle_admin(Snapshot())
        assert isinstance(report, SnapshotReport)
        return report.num_nodes


# --- who holds it ---


def test_the_state_a_request_came_from_is_held_until_the_step_that_passes_it_is_done() -> None:
    rig = Rig()
    rig.talk(TEXT, 8)
    engine, rid = rig.engine, rig.opened([*TEXT, 9, 10, 11, 12]).rid
    assert rig.evict(9) == [0, 0, 0, 0]
    engine.reserve(rid, 4)
    engine.commit(rid, 9)
    engine.step(done_step=engine.num)
    assert rig.evict(9) == [0, 0, 0, 0]
    engine.commit(rid, 10)
    passed = engine.num
    assert rig.evict(9) == [0, 0, 0, 0]
    engine.step(done_step=passed - 1)
    assert rig.evict(9) == [0, 0, 0, 0]
    engine.step(done_step=passed)
    assert rig.evict(9)[2] == 2


def test_a_state_just_frozen_is_held_until_its_request_has_passed_it_again() -> None:
    rig = Rig()
    engine, rid = rig.engine, rig.talk(TEXT, 8, closed=False)
    engine.step(done_step=engine.num)
    assert rig.evict(9) == [0, 0, 0, 0]
    engine.reserve(rid, 2)
    engine.commit(rid, 10, tokens=[9, 10])
    assert rig.evict(9) == [0, 0, 0, 0]
    engine.step(done_step=engine.num)
    assert rig.evict(9)[2] == 2


def test_an_edge_frozen_when_later_pages_were_full_already_is_let_go_by_the_next_commit() -> None:
    rig = Rig()
    engine, rid = rig.engine, rig.talk(TEXT, closed=False)
    engine.freeze(rid, 4)
    engine.step(done_step=engine.num)
    assert rig.evict(9) == [0, 0, 0, 0]
    engine.commit(rid, 8)
    engine.step(done_step=engine.num)
    assert rig.evict(9) == [0, 0, 2, 0]


def test_freezing_again_lets_go_of_the_state_before_once_the_step_is_done() -> None:
    rig = Rig()
    engine, rid = rig.engine, rig.talk(TEXT, closed=False)
    engine.freeze(rid, 6)
    engine.step(done_step=engine.num)
    engine.freeze(rid, 8)
    froze = engine.num
    engine.step(done_step=froze - 1)
    assert rig.evict(9) == [0, 0, 0, 0]
    engine.step(done_step=froze)
    assert rig.evict(9) == [0, 0, 2, 0]
    assert rig.places(TEXT) == [8]


@pytest.mark.parametrize("passed", [False, True])
def test_close_lets_go_of_everything_at_once_also_of_what_was_leaving(passed: bool) -> None:
    rig = Rig()
    rig.talk(TEXT, 8)
    engine, rid = rig.engine, rig.opened([*TEXT, 9, 10, 11, 12]).rid
    engine.reserve(rid, 4)
    if passed:
        engine.commit(rid, 10)
    engine.step(closes=[Close([ReqId(rid)])], done_step=engine.done)
    assert rig.evict(9)[2] == 2


def test_leave_lets_go_of_everything() -> None:
    rig = Rig()
    rig.talk(TEXT, 8)
    rid = rig.opened([*TEXT, 9, 10, 11, 12]).rid
    rig.engine.reserve(rid, 4)
    rig.engine.commit(rid, 10)
    rig.opened([*TEXT, 9])
    rig.engine.leave()
    assert rig.evict(9)[2] == 2


def test_two_requests_hold_one_checkpoint_each_for_itself() -> None:
    rig = Rig()
    rig.talk(TEXT, 8)
    first, second = rig.opened([*TEXT, 9]), rig.opened([*TEXT, 10])
    assert first.state_in == second.state_in
    assert len({page for answer in (first, second) for page in answer.pages[2]}) == 4
    rig.engine.close(first.rid)
    assert rig.evict(9) == [0, 0, 0, 0]
    rig.engine.close(second.rid)
    assert rig.evict(9)[2] == 2


def test_an_open_that_is_refused_holds_no_state() -> None:
    rig = Rig(26)
    rig.talk(TEXT, 8)
    rig.opened([7] * 8, max_new=16)
    rig.next_rid += 1
    tokens = [*TEXT, *[9] * 12]
    reply = rig.engine.open(rig.next_rid, tokens, max_new=0)
    assert reply.open_no_room is not None
    rig.manager.handle_admin(Flush())
    check(rig.manager)
    assert rig.places(TEXT) == []


# --- thinning ---


def test_two_near_ones_and_one_for_each_doubling_are_kept() -> None:
    rig = Rig(checkpoint_interval=4)
    text = list(range(64))
    rig.talk(text, *range(2, 65, 2))
    places = rig.places(text)
    near = [place for place in places if 64 - 4 < place < 64]
    assert places[-1] == 64
    assert near == [62]
    distances = [(64 - place) // 4 for place in places if place <= 60]
    doublings = [distance.bit_length() for distance in distances]
    assert sorted(set(doublings), reverse=True) == doublings
    assert set(doublings) == {1, 2, 3, 4}
    assert stats_of(rig.manager).num_thinned == 32 - len(places)


def test_of_three_within_an_interval_the_oldest_goes() -> None:
    rig = Rig(checkpoint_interval=16)
    rig.talk(TEXT, 2, 4, 6, 8)
    assert rig.places(TEXT) == [4, 6, 8]
    rig.talk([*TEXT, 9, 10], 10)
    assert rig.places([*TEXT, 9, 10]) == [6, 8, 10]
    assert stats_of(rig.manager).num_thinned == 2


def test_thinning_leaves_checkpoints_at_forks_and_of_other_paths() -> None:
    rig = Rig(checkpoint_interval=32)
    left, right = [*TEXT, 20, 21, 22, 23, 24, 25, 26, 27], [*TEXT, 30, 31, 32, 33]
    rig.talk(TEXT, 8)
    rig.talk(right, 10)
    rig.talk(left, 10, 12, 14, 16)
    assert rig.places(left) == [8, 12, 14, 16]
    assert rig.places(right) == [8, 10]


def test_thinning_leaves_what_is_held() -> None:
    rig = Rig(checkpoint_interval=32)
    rig.talk(TEXT, 2)
    held = rig.opened([1, 2, 9])
    rig.talk(TEXT, 4, 6, 8)
    assert rig.places(TEXT) == [2, 4, 6, 8]
    rig.engine.close(held.rid)
    rig.talk([*TEXT, 9, 10], 10)
    assert rig.places([*TEXT, 9, 10]) == [6, 8, 10]


# --- eviction ---


def test_a_checkpoint_inside_a_text_goes_by_its_own_age() -> None:
    rig = Rig(checkpoint_interval=2)
    rig.talk(TEXT, 4)
    rig.talk([*[9] * 8], 4)
    rig.clock.now += 1
    rig.engine.close(rig.opened([1, 2, 3, 4, 50]).rid)
    rig.manager.handle_admin(Evict(kind="state", num_pages=1))
    assert (rig.places(TEXT), rig.places([9] * 8)) == ([4], [])


def test_the_tail_of_a_conversation_goes_before_the_checkpoint_inside_it() -> None:
    rig = Rig()
    rid = rig.talk(TEXT, 4, closed=False)
    rig.clock.now += 1
    rig.engine.close(rid)
    held = rig.talk([9] * 8, closed=False)
    assert held
    # the checkpoint was let go while its text was still held, so it is older; one that is let go with it is not
    assert rig.evict(1, "target_kv")[2] == 2
    other = Rig()
    rid = other.talk(TEXT, closed=False)
    other.engine.close(rid, freeze_at=4)
    assert other.evict(1, "target_kv") == [1, 1, 0, 0]
    assert (other.places(TEXT), other.cached(TEXT)) == ([4], 6)


def test_a_checkpoint_goes_with_the_page_before_it() -> None:
    rig = Rig()
    rid = rig.talk(TEXT, closed=False)
    rig.engine.close(rid, freeze_at=8)
    assert rig.evict(1, "target_kv") == [1, 1, 2, 0]
    assert (rig.places(TEXT), rig.cached(TEXT)) == ([], 6)


def test_eviction_never_takes_a_state_in_use() -> None:
    rig = Rig()
    rig.talk(TEXT, 6)
    answer = rig.opened(TEXT)
    rig.manager.handle_admin(Flush())
    check(rig.manager)
    assert answer.prefix_len == 6
    assert rig.places(TEXT) == [6]
    rig.engine.close(answer.rid)
    rig.engine.step(done_step=rig.engine.num)
    rig.manager.handle_admin(Flush())
    stats = stats_of(rig.manager)
    assert (stats.num_checkpoints, stats.frames_empty + 1) == (0, stats.num_frames)


def test_states_make_room_for_text_and_text_for_states() -> None:
    rig = Rig(25)
    rig.talk(TEXT, 8)
    rig.engine.step(done_step=rig.engine.num)
    rid = rig.opened([30] * 2, max_new=40).rid
    for length in range(2, 42, 2):
        assert rig.engine.reserve(rid, 2).no_room is None
        rig.engine.commit(rid, length, tokens=[30, 30])
        check(rig.manager)
    assert rig.places(TEXT) == []
    rig.engine.close(rid)
    rig.engine.step(done_step=rig.engine.num)
    rig.clock.now += 1
    assert [type(a) for a in rig.engine.step(opens=[op(100 + i) for i in range(5)]).opened] == [Opened] * 5
    check(rig.manager)
    assert rig.cached([30] * 40) < 40


def op(rid: int) -> OpenReq:
    return OpenReq(ReqId(rid), pack_tokens([rid]), max_new=0)


# --- moving about ---


def test_a_split_keeps_every_checkpoint_at_its_place() -> None:
    rig = Rig(checkpoint_interval=2)
    text = list(range(16))
    rig.talk(text, 4, 8, 12)
    before = rig.places(text)
    rig.talk([*text[:10], 99, 98])
    assert rig.places(text) == before
    rig.talk([*text[:8], 97, 96])
    assert rig.places(text) == before
    assert [rig.opened([*text[:n], 95]).prefix_len for n in (8, 12, 16)] == [8, 12, 12]
    check(rig.manager)


def test_joining_nodes_keeps_every_checkpoint_at_its_place() -> None:
    rig = Rig(checkpoint_interval=2)
    text = list(range(16))
    fork = [*text[:10], 99, 98]
    rig.talk(text, 4, 8, 12, 16)
    rig.talk(fork)
    before = rig.places(text)
    rig.clock.now += 1
    for length in (4, 8, 12, 16):
        rig.engine.close(rig.opened([*text[:length], 5]).rid)
    num_nodes = rig.num_nodes()
    while rig.cached(fork) > 10:
        rig.evict(1, "target_kv")
    rig.engine.close(rig.opened([*text, 5]).rid)
    assert rig.num_nodes() < num_nodes
    assert rig.places(text) == before
    assert [rig.opened([*text[:place], 5]).prefix_len for place in before] == before
    check(rig.manager)


def test_a_checkpoint_of_pages_that_a_duplicate_replaces_stays() -> None:
    rig = Rig()
    # both open before anything is cached; the first is gone when the second publishes the same text
    first, second = rig.opened(TEXT), rig.opened(TEXT)
    for answer in (first, second):
        rig.engine.reserve(answer.rid, 8)
    rig.engine.commit(first.rid, 8)
    rig.engine.close(first.rid, freeze_at=8)
    assert rig.engine.step(commit=make_commit(second.rid, 8, 8, [])).remap_pages == []
    check(rig.manager)
    assert rig.opened([*TEXT, 9]).prefix_len == 8
