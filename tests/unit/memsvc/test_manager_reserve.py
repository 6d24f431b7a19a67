"""Reservations under pressure: all or nothing, victims, the elder, other engines, watermarks, quotas."""

from typing import Any

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import GetStats, Pin, Pinned, Stats, Unpin
from memsvc.wire.base import BadRequest, ReqId, pack_tokens
from memsvc.wire.mem import Close, Fenced, NoRoom, Opened, Reserve, Step, Stepped
from tests.support.mem_builders import DRAFT, TARGET, Clock, Engine, check, make_config, make_manager, windowed


def reserve(engine: Engine, **nums: int) -> Stepped:
    """reserve(engine, r1=4, r2=4)"""
    rids = [ReqId(int(name[1:])) for name in nums]
    return engine.step(reserve=Reserve(rids=rids, nums=list(nums.values())))


def retract(engine: Engine, *rids: int) -> None:
    """Retract and let limbo drain."""
    engine.step(closes=[Close([ReqId(rid) for rid in rids], "retract")])
    engine.step(done_step=engine.num)


def stats_of(manager: MemoryManager) -> Stats:
    stats = manager.handle_admin(GetStats())
    assert isinstance(stats, Stats)
    return stats


def refusal(reply: Stepped) -> NoRoom:
    assert reply.no_room is not None, reply
    assert reply.grow_pages == []
    assert reply.opened == []
    return reply.no_room


def three(priorities: tuple[int, int, int] = (0, 0, 0), **config: Any) -> Engine:
    """Requests 1, 2, 3 with their prompts filled: 4 + 4 pages each, 6 + 4 of 18 frames in all.

    The elder may take 4 + 4 more, 2 + 2 frames; the others 8 + 8 more each.
    """
    engine = Engine(make_manager(19, **config))
    for rid, priority in enumerate(priorities, start=1):
        engine.run(rid, [10 * rid] * 8, max_new=4 if rid == 1 else 12, priority=priority)
    return engine


def test_reserve_gives_all_requests_or_none() -> None:
    engine = three()
    no_room = refusal(reserve(engine, r1=2, r2=16))
    assert no_room.needs == [9, 9]
    assert reserve(engine, r1=2, r2=8).no_room is None
    check(engine.manager)


def test_vectors_of_no_room_are_by_kind_and_name_what_can_be_had() -> None:
    engine = three()
    no_room = refusal(reserve(engine, r2=16))
    # 8 frames are left, for either kind
    assert no_room.has == [16, 24]
    assert no_room.limbo == [0, 0]


def test_victims_are_newest_first_and_enough() -> None:
    engine = three()
    no_room = refusal(reserve(engine, r1=2, r2=16))
    assert no_room.victims == [3]
    assert no_room.waiting_on == ""
    retract(engine, 3)
    assert reserve(engine, r1=2, r2=16).no_room is None
    check(engine.manager)


def test_low_priority_goes_before_new() -> None:
    engine = three(priorities=(0, 0, 1))
    assert refusal(reserve(engine, r1=2, r2=16, r3=2)).victims == [2]


def test_the_elder_is_never_a_victim_of_others() -> None:
    engine = three(priorities=(0, 5, 9))
    no_room = refusal(reserve(engine, r2=16, r3=16))
    assert no_room.victims == [2]
    assert stats_of(engine.manager).elder == 1


def test_the_elder_finishes_however_others_grow() -> None:
    engine = three()
    lens = {2: 8, 3: 8}
    for rid in (2, 3) * 8:
        if reserve(engine, **{f"r{rid}": 2}).no_room is None:
            lens[rid] += 2
            engine.commit(rid, lens[rid], tokens=[rid, rid])
    assert sum(lens.values()) < 2 * 24
    for length in range(9, 17):
        assert engine.reserve(1, 1).no_room is None
        engine.commit(1, length, tokens=[1])
        check(engine.manager)


def test_waiting_for_limbo_is_enough_when_it_is() -> None:
    engine = Engine(make_manager(19))
    engine.run(1, [10] * 8, max_new=4)
    engine.run(2, [20] * 8, max_new=12)
    engine.open(3, [30] * 8, max_new=12)
    engine.reserve(3, 8)
    done = engine.done
    engine.step(closes=[Close([ReqId(3)], "abort")], done_step=done)
    no_room = refusal(engine.step(reserve=Reserve([ReqId(2)], [16]), done_step=done))
    assert (no_room.victims, no_room.waiting_on) == ([], "limbo")
    assert no_room.limbo == [4, 4]
    assert engine.step(reserve=Reserve([ReqId(2)], [16]), done_step=engine.num).no_room is None


def test_waiting_for_quarantine_is_reported_as_such() -> None:
    manager = make_manager(19)
    engine, other = Engine(manager), Engine(manager, name="other", pid=2)
    engine.run(1, [10] * 8, max_new=4)
    engine.run(2, [20] * 8, max_new=12)
    other.open(1, [30] * 8, max_new=0)
    other.reserve(1, 8)
    other.pid = 3
    old = other.epoch
    other.register()
    no_room = refusal(reserve(engine, r2=16))
    assert (no_room.victims, no_room.waiting_on) == ([], "quarantine")
    manager.client_exited(old)
    assert reserve(engine, r2=16).no_room is None
    check(manager)


def two_engines(clock: Clock | None = None, **config: Any) -> tuple[Engine, Engine]:
    """As three(), but the newest is request 1 of the other engine."""
    manager = MemoryManager(make_config(19, **config), clock=clock or Clock())
    e, f = Engine(manager, name="e", pid=1), Engine(manager, name="f", pid=2)
    e.run(1, [10] * 8, max_new=4)
    e.run(2, [20] * 8, max_new=12)
    f.run(1, [30] * 8, max_new=12)
    return e, f


def test_another_engine_is_asked_in_its_own_next_reply() -> None:
    e, f = two_engines()
    no_room = refusal(reserve(e, r2=16))
    assert (no_room.victims, no_room.waiting_on) == ([], "other engine")
    reply = f.step()
    assert (reply.retract, reply.retract_ms) == ([1], 2000)
    assert f.step().retract == [1]
    assert refusal(reserve(e, r2=16)).waiting_on == "other engine"
    f.close(1, "retract")
    assert f.step().retract == []
    assert reserve(e, r2=16).no_room is None
    check(e.manager)


def test_an_engine_that_keeps_what_was_asked_back_is_fenced_after_the_deadline() -> None:
    clock = Clock()
    e, f = two_engines(clock)
    reserve(e, r2=16)
    f.step()
    assert e.manager.tick() <= 2.0
    clock.now += 1.9
    e.manager.tick()
    assert f.step().retract == [1]
    clock.now += 0.2
    e.manager.tick()
    assert f.send() == Fenced(f.epoch)
    assert reserve(e, r2=16).no_room is None
    check(e.manager)


def test_a_flagged_request_that_becomes_the_elder_may_stay() -> None:
    clock = Clock()
    e, f = two_engines(clock)
    reserve(e, r2=16)
    retract(e, 1, 2)
    assert f.step().retract == []
    clock.now += 5
    e.manager.tick()
    assert isinstance(f.send(), Stepped)


def test_what_was_given_back_for_another_engine_is_not_taken_again_by_opening() -> None:
    e, f = two_engines(high_watermark=0.0)
    reserve(e, r2=16)
    f.close(1, "retract")
    f.step(done_step=f.num)
    again = f.open(2, [30] * 8, max_new=12)
    assert again.opened == []
    assert again.open_no_room is not None
    assert reserve(e, r2=16).no_room is None


def test_opens_wait_for_the_high_watermark_after_a_no_room() -> None:
    engine = three()
    reserve(engine, r2=16)
    small = engine.open(4, [1], max_new=0)
    assert small.open_no_room is not None
    assert small.open_no_room.waiting_on == "watermark"
    retract(engine, 3)
    assert isinstance(engine.open(4, [1], max_new=0).opened[0], Opened)


def test_an_empty_pool_opens_whatever_the_watermark_says() -> None:
    engine = three(high_watermark=1.0)
    reserve(engine, r2=16)
    retract(engine, 2, 3)
    assert engine.open(4, [1], max_new=0).open_no_room is not None
    retract(engine, 1)
    assert isinstance(engine.open(4, [1], max_new=0).opened[0], Opened)


def test_the_low_watermark_leaves_room_for_growth() -> None:
    engine = Engine(make_manager(20, low_watermark=0.25, high_watermark=0.25))
    num = 0
    while engine.open(num + 1, [num + 1] * 8, max_new=0).opened:
        num += 1
        engine.reserve(num, 8)
        engine.commit(num, 8)
    assert num > 1
    assert stats_of(engine.manager).frames_empty >= 0.25 * 19


def test_a_window_bounds_what_a_long_request_needs() -> None:
    kinds = [TARGET, windowed(DRAFT, 4)]
    engine = Engine(make_manager(16, kinds, max_extend_tokens=4))
    # 24 target pages are 12 frames; at most 2 + 2 + 1 draft pages at once are 2
    assert isinstance(engine.open(1, [1], max_new=43).opened[0], Opened)
    for length in range(1, 45):
        assert engine.reserve(1, 4).no_room is None
        engine.commit(1, length, tokens=[length])
        check(engine.manager)
    assert isinstance(engine.send(reserve=Reserve([ReqId(1)], [5])), BadRequest)


def test_more_than_max_extend_tokens_at_once_is_refused() -> None:
    engine = Engine(make_manager(16, max_extend_tokens=4))
    engine.open(1, [1] * 8)
    reply = engine.send(reserve=Reserve([ReqId(1)], [5]))
    assert isinstance(reply, BadRequest)
    assert "at most 4 at once" in reply.reason


def test_an_engine_stays_within_its_quota_and_its_newest_gives_way() -> None:
    manager = make_manager(40, engine_quota_frames={"e": 10})
    engine, other = Engine(manager), Engine(manager, name="other")
    engine.run(1, [10] * 8, max_new=4)
    engine.run(2, [20] * 8, max_new=4)
    other.run(1, [30] * 8, max_new=30)
    # two of 8 pages of each kind: 8 + 6 frames
    no_room = refusal(reserve(engine, r1=8, r2=8))
    assert no_room.victims == [2]
    assert other.reserve(1, 30).no_room is None
    too_large = engine.open(3, [40] * 8, max_new=16).opened
    assert too_large == [] or too_large[0].frames_usable == 10  # type: ignore[union-attr]
    check(manager)


def test_a_salt_quota_counts_over_engines() -> None:
    manager = make_manager(40, salt_quota_frames={"s": 10})
    engine, other = Engine(manager), Engine(manager, name="other")
    engine.run(1, [10] * 8, max_new=0, salt="s")
    other.run(1, [20] * 8, max_new=0, salt="s")
    reply = engine.open(2, [30] * 8, max_new=0, salt="s")
    assert reply.open_no_room is not None
    assert isinstance(engine.open(2, [30] * 8, max_new=0).opened[0], Opened)


def test_the_elder_alone_and_without_room_is_named_itself_as_the_last_rung() -> None:
    engine = Engine(make_manager(10, high_watermark=0.0))
    engine.run(1, [10] * 8, max_new=4)
    # Pages of a kind spread over frames that the other kind needs; only a fault does so in so small a pool.
    pool = engine.manager._store.pool
    spread = [pool.take(1, 3, 0.0) for _ in range(3)]
    no_room = refusal(reserve(engine, r1=8))
    assert (no_room.victims, no_room.waiting_on) == ([1], "")
    retract(engine, 1)
    for pages in spread:
        for page in pages:
            pool.free(1, page)
    assert isinstance(engine.open(1, [10] * 8, max_new=4).opened[0], Opened)
    assert engine.reserve(1, 8).no_room is None
    check(engine.manager)


def test_a_pin_that_would_take_what_the_elder_was_promised_is_refused() -> None:
    manager = make_manager(11, pin_budget_frames=4)
    engine = Engine(manager)
    engine.run(1, [10] * 8, max_new=0)
    engine.close(1)
    engine.step(done_step=engine.num)
    engine.open(2, [20] * 3, max_new=0)
    pin = Pin(name="a", tokens=pack_tokens([10] * 8), ttl_s=10)
    reply = manager.handle_admin(pin)
    assert isinstance(reply, Pinned)
    assert reply.pinned_len == 8
    manager.handle_admin(Unpin("a"))
    pool = manager._store.pool
    taken = [pool.take(0, 2, 0.0) for _ in range(4)]
    refused = manager.handle_admin(pin)
    assert isinstance(refused, BadRequest)
    assert "could not finish beside it" in refused.reason
    for pages in taken:
        for page in pages:
            pool.free(0, page)
    check(manager)


def test_a_reservation_that_takes_nothing_is_always_granted() -> None:
    engine = three()
    reserve(engine, r2=16)
    assert reserve(engine, r1=0, r2=0, r3=0).no_room is None
    assert isinstance(engine.manager.handle(Step(engine.epoch, engine.num + 1, 0)), Stepped)
