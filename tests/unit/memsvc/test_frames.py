"""FramePool against a recount after every operation."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memsvc.core.frames import FramePool
from memsvc.core.page_states import FREE, LIMBO, PRIVATE, TREE
from tests.support import hypothesis_profiles

PER_FRAME = (2, 3)
NUM_FRAMES, FIRST = 9, 2
picks = st.integers(0, 1 << 16)
kinds = st.integers(0, 1)


def make_pool() -> FramePool:
    return FramePool(PER_FRAME, NUM_FRAMES, FIRST)


def test_dummy_and_exchange_pages_are_never_handed_out() -> None:
    pool = make_pool()
    pages = []
    while has_hole(pool, 1):
        pages += pool.take(1, 99, 0.0)
    assert sorted(pages) == list(range(FIRST * 3, NUM_FRAMES * 3))


def has_hole(pool: FramePool, kind: int) -> bool:
    """Whether take() finds a page."""
    return bool(pool.locked_holes.mask[kind] or pool.loose_holes.mask[kind] or pool.empty)


def test_fullest_locked_frame_is_filled_first() -> None:
    pool = make_pool()
    first = pool.take(1, 3, 0.0)
    second = pool.take(1, 3, 0.0)
    pool.free(1, first[0])
    for page in second[:2]:
        pool.free(1, page)
    assert pool.take(1, 1, 0.0) == [first[0]]
    assert {page // 3 for page in pool.take(1, 2, 0.0)} == {second[0] // 3}


def test_a_hole_in_a_locked_frame_goes_before_one_in_a_loose_frame() -> None:
    pool = make_pool()
    loose, locked = pool.take(1, 3, 0.0), pool.take(1, 3, 0.0)
    pool.publish(1, loose)
    pool.unblock(1, loose)
    pool.drop(1, loose[:2])
    pool.free(1, locked[0])
    pool.free(1, locked[1])
    assert [page // 3 for page in pool.take(1, 2, 0.0)] == [locked[0] // 3] * 2


def test_an_empty_frame_goes_before_a_loose_one_and_of_these_the_one_with_most_room() -> None:
    pool = FramePool(PER_FRAME, FIRST + 4, FIRST)
    fuller, emptier = pool.take(1, 3, 0.0), pool.take(1, 3, 0.0)
    for pages in (fuller, emptier):
        pool.publish(1, pages)
        pool.unblock(1, pages)
    pool.drop(1, fuller[:1])
    assert [pool.has_roomy_frame(1), len(pool.empty)] == [True, 2]
    for _ in range(2):
        assert not {page // 3 for page in pool.take(1, 3, 0.0)} & {fuller[0] // 3, emptier[0] // 3}
    assert not pool.has_roomy_frame(1)
    pool.drop(1, emptier[:2])
    assert pool.has_roomy_frame(1)
    assert [page // 3 for page in pool.take(1, 2, 0.0)] == [emptier[0] // 3] * 2
    assert [page // 3 for page in pool.take(1, 1, 0.0)] == [fuller[0] // 3]


def test_an_emptied_frame_serves_the_other_kind_and_asks_for_clearing() -> None:
    pool = FramePool(PER_FRAME, FIRST + 1, FIRST)
    pages = pool.take(0, 2, 0.0)
    assert pool.to_clear == [(0, page) for page in pages]
    pool.to_clear = []
    for page in pages:
        pool.free(0, page)
    assert pool.take(0, 1, 0.0) == pages[:1]
    assert pool.to_clear == []
    pool.free(0, pages[0])
    [page] = pool.take(1, 1, 0.0)
    assert pool.to_clear == [(1, page)]
    more = pool.take(1, 2, 0.0)
    assert pool.to_clear == [(1, each) for each in [page, *more]]


def test_a_page_whose_taker_died_is_cleared_again() -> None:
    pool = make_pool()
    pages = pool.take(1, 2, 0.0)
    pool.to_clear = []
    pool.free(1, pages[0])
    pool.unsure.add((1, pages[0]))
    assert pool.take(1, 1, 0.0) == [pages[0]]
    assert pool.to_clear == [(1, pages[0])]
    assert not pool.unsure


class Frames(RuleBasedStateMachine):
    """Pages in every state, moved at random; the model is a dict of states and a set of blocked pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.states: dict[tuple[int, int], int] = {}
        self.blocked: set[tuple[int, int]] = set()

    def pick(self, pick: int, *states: int, blocked: bool | None = None) -> tuple[int, int] | None:
        found = [
            key
            for key, state in sorted(self.states.items())
            if state in states and (blocked is None or (key in self.blocked) == blocked)
        ]
        return found[pick % len(found)] if found else None

    @rule(kind=kinds, num=st.integers(1, 4))
    @precondition(lambda self: has_hole(self.pool, 0) and has_hole(self.pool, 1))
    def take(self, kind: int, num: int) -> None:
        pages = self.pool.take(kind, num, 1.0)
        assert 1 <= len(pages) <= num
        for page in pages:
            assert (kind, page) not in self.states
            self.states[kind, page] = PRIVATE
            self.blocked.add((kind, page))

    @rule(pick=picks)
    def publish(self, pick: int) -> None:
        key = self.pick(pick, PRIVATE)
        if key:
            self.pool.publish(key[0], [key[1]])
            self.states[key] = TREE

    @rule(pick=picks)
    def retire(self, pick: int) -> None:
        key = self.pick(pick, PRIVATE)
        if key:
            self.pool.set_state(*key, LIMBO)
            self.states[key] = LIMBO

    @rule(pick=picks)
    def free(self, pick: int) -> None:
        key = self.pick(pick, PRIVATE, LIMBO)
        if key:
            self.pool.free(*key)
            del self.states[key]
            self.blocked.discard(key)

    @rule(pick=picks, block=st.booleans())
    def turn_lock(self, pick: int, block: bool) -> None:
        key = self.pick(pick, TREE, blocked=not block)
        if key and block:
            self.pool.block(key[0], [key[1]])
            self.blocked.add(key)
        elif key:
            self.pool.unblock(key[0], [key[1]])
            self.blocked.discard(key)

    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        key = self.pick(pick, TREE, blocked=False)
        if key:
            self.pool.drop(key[0], [key[1]])
            del self.states[key]

    @invariant()
    def frames_sum_up(self) -> None:
        pool = self.pool
        by_frame: dict[int, set[int]] = {}
        for kind, page in self.states:
            by_frame.setdefault(page // PER_FRAME[kind], set()).add(kind)
        assert all(len(kinds) == 1 for kinds in by_frame.values())
        assert len(pool.empty) == NUM_FRAMES - FIRST - len(by_frame)
        locked = {page // PER_FRAME[kind] for kind, page in self.blocked}
        assert pool.num_loose == len(by_frame.keys() - locked)
        for kind, per_frame in enumerate(PER_FRAME):
            frames = [frame for frame in locked if by_frame[frame] == {kind}]
            blocked = sum(1 for key in self.blocked if key[0] == kind)
            assert pool.spare[kind] == len(frames) * per_frame - blocked
            cut = [frame for frame, kinds in by_frame.items() if kinds == {kind}]
            held = sum(1 for key in self.states if key[0] == kind)
            assert pool.counts[kind][FREE] == len(cut) * per_frame - held
            for state in (PRIVATE, TREE, LIMBO):
                held = sum(1 for key, s in self.states.items() if key[0] == kind and s == state)
                assert pool.counts[kind][state] == held
            assert pool.available(kind) == pool.spare[kind] + pool.frames_available * per_frame

    @invariant()
    def buckets_hold_each_partial_frame_once(self) -> None:
        pool = self.pool
        for name, holes in (("locked", pool.locked_holes), ("loose", pool.loose_holes)):
            for kind, per_frame in enumerate(PER_FRAME):
                listed = {n: holes.frames(kind, n) for n in range(1, per_frame + 1)}
                for num_free, frames in listed.items():
                    assert bool(holes.mask[kind] >> num_free & 1) == bool(frames)
                    for frame in frames:
                        assert pool.num_free[frame] == num_free
                        assert (pool.num_blocked[frame] > 0) == (name == "locked")


TestFrames = Frames.TestCase
TestFrames.settings = hypothesis_profiles.load()
