"""Several engines, and tenants with quotas, in one pool: who gives way to whom."""

from typing import Any

from memsvc.core.manager import MemoryManager
from memsvc.wire.mem import Fenced, Opened, Stepped
from tests.support.mem_builders import Clock, Engine, check, make_config, make_manager, refusal, reserve, retract


def two_engines(clock: Clock | None = None, **config: Any) -> tuple[Engine, Engine]:
    """As three(), but the newest is request 1 of the other engine."""
    manager = MemoryManager(make_config(19, **config), clock=clock or Clock())
    e, f = Engine(manager, name="e", pid=1), Engine(manager, name="f", pid=2)
    e.run(1, [10] * 8, max_new=4)
    e.run(2, [20] * 8, max_new=12)
    f.run(1, [30] * 8, max_new=12)
    return e, f


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
    clock.now += 5
    e.manager.tick()
    assert f.step().retract == []
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
