"""Reservations under pressure: all or nothing, victims, the elder, watermarks, windows."""

from typing import Any

from memsvc.wire.admin import Pin, Pinned, Unpin
from memsvc.wire.base import BadRequest, ReqId, pack_tokens
from memsvc.wire.mem import Close, Opened, Reserve, Step, Stepped
from tests.support.mem_builders import (
    DRAFT,
    TARGET,
    Engine,
    check,
    make_manager,
    refusal,
    reserve,
    retract,
    stats_of,
    windowed,
)


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
