"""Registration, epochs, repeated steps, fences, leases, quarantine, co-writers."""

import pytest

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import GetStats, KindStats, Match, Matched, Stats
from memsvc.wire.base import WIRE_VERSION, BadRequest, Done, Epoch, ReqId, pack_tokens
from memsvc.wire.mem import Fenced, Opened, OpenReq, Register, Registered, Renew, Reserve, Step, Stepped
from tests.support.mem_builders import TARGET, Clock, Engine, check, make_config, make_manager

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


def kinds_of(manager: MemoryManager) -> list[KindStats]:
    stats = manager.handle_admin(GetStats())
    assert isinstance(stats, Stats)
    return stats.kinds


def quarantined(manager: MemoryManager) -> list[int]:
    check(manager)
    return [kind.num_quarantine for kind in kinds_of(manager)]


def half_written(engine: Engine) -> None:
    """Request 1 with 2 + 2 pages published and 2 + 2 private ones."""
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.commit(1, 4)


def register(**changes: object) -> Register:
    fields = {
        "wire_version": WIRE_VERSION,
        "engine": "e",
        "role": "target",
        "kinds": ["target_kv"],
        "model_fingerprint": "m",
        "pid": 1,
    } | changes
    return Register(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"wire_version": WIRE_VERSION + 1}, f"wire version {WIRE_VERSION + 1}, this service speaks {WIRE_VERSION}"),
        ({"role": "king"}, "role 'king'"),
        ({"kinds": ["target_kv", "x"]}, "kinds ['x'] are not of this pool, which has (pages a frame) {'target_kv': 2"),
        ({"kinds": ["draft_kv"]}, "a target must use kind 'target_kv'"),
    ],
)
def test_a_client_that_cannot_be_served_is_refused(changes: dict, text: str) -> None:
    reply = make_manager().handle(register(**changes))
    assert isinstance(reply, BadRequest)
    assert text in reply.reason


def test_registered_carries_layout_lease_and_endpoint() -> None:
    manager = make_manager(fd_endpoint="somewhere", lease_ms=1234)
    reply = manager.handle(register())
    assert reply == Registered(epoch=Epoch(1), layout=manager.layout, lease_ms=1234, fd_endpoint="somewhere")


def test_a_second_registration_fences_the_first() -> None:
    manager = make_manager()
    first = Engine(manager)
    second = Engine(manager, pid=2)
    assert first.send() == Fenced(first.epoch)
    assert manager.handle(Renew(first.epoch)) == Fenced(first.epoch)
    assert isinstance(second.send(), Stepped)


def test_an_epoch_never_given_out_is_a_mistake_not_a_fence() -> None:
    reply = make_manager().handle(Renew(Epoch(7)))
    assert isinstance(reply, BadRequest)
    assert "epoch 7 was never given out" in reply.reason


def test_the_last_four_replies_are_repeated_and_a_gap_is_refused() -> None:
    engine = Engine(make_manager(40))
    replies = [engine.open(rid, TEXT) for rid in range(1, 7)]
    before = kinds_of(engine.manager)
    for num in range(1, 7):
        reply = engine.manager.handle(Step(engine.epoch, num, 0, opens=[]))
        if num > 2:
            assert reply == replies[num - 1]
        else:
            assert isinstance(reply, BadRequest)
    gap = engine.manager.handle(Step(engine.epoch, 8, 0))
    assert isinstance(gap, BadRequest)
    assert "step 8 after step 6" in gap.reason
    assert kinds_of(engine.manager) == before


def test_a_step_with_a_mistake_takes_no_number() -> None:
    engine = Engine(make_manager())
    assert isinstance(engine.send(reserve=Reserve([ReqId(1)], [1])), BadRequest)
    assert isinstance(engine.open(1, TEXT), Stepped)


def test_a_draft_does_not_step() -> None:
    draft = Engine(make_manager(), role="draft")
    reply = draft.send()
    assert isinstance(reply, BadRequest)
    assert "a draft does not step" in reply.reason


def test_rids_of_two_engines_may_be_equal() -> None:
    manager = make_manager(40)
    a, b = Engine(manager, name="a"), Engine(manager, name="b")
    a.open(1, TEXT)
    b.open(1, [9] * 8)
    a.close(1)
    assert b.reserve(1, 8).no_room is None
    check(manager)


def test_private_pages_of_a_replaced_client_wait_for_its_process() -> None:
    manager = make_manager()
    engine = Engine(manager)
    half_written(engine)
    old = engine.epoch
    engine.pid = 2
    engine.register()
    assert quarantined(manager) == [2, 2]
    manager.client_exited(old)
    assert quarantined(manager) == [0, 0]


def test_pages_in_limbo_go_to_quarantine_too() -> None:
    manager = make_manager()
    engine = Engine(manager)
    half_written(engine)
    engine.step(closes=[], done_step=0)
    engine.close(1)
    engine.pid = 2
    engine.register()
    assert quarantined(manager) == [2, 2]


def test_a_dead_target_waits_for_its_draft_to_acknowledge() -> None:
    manager = make_manager()
    engine, draft = Engine(manager), Engine(manager, role="draft", kinds=("draft_kv",), pid=5)
    half_written(engine)
    manager.client_exited(engine.epoch)
    assert quarantined(manager) == [2, 2]
    assert draft.acknowledge(engine.epoch) == Done()
    assert quarantined(manager) == [2, 2]
    engine.register()
    assert draft.acknowledge(engine.epoch) == Done()
    assert quarantined(manager) == [0, 0]


def test_a_draft_that_is_gone_is_not_waited_for() -> None:
    manager = make_manager()
    engine, draft = Engine(manager), Engine(manager, role="draft", pid=5)
    half_written(engine)
    manager.client_exited(engine.epoch)
    manager.client_exited(draft.epoch)
    assert quarantined(manager) == [0, 0]


def test_a_replaced_draft_is_waited_for_until_its_process_is_gone() -> None:
    manager = make_manager()
    engine, draft = Engine(manager), Engine(manager, role="draft", pid=5)
    half_written(engine)
    old_draft = draft.epoch
    draft.pid = 6
    draft.register()
    manager.client_exited(engine.epoch)
    draft.acknowledge(Epoch(99))
    assert quarantined(manager) == [2, 2]
    manager.client_exited(old_draft)
    assert quarantined(manager) == [0, 0]


def test_a_draft_of_another_engine_cannot_acknowledge() -> None:
    manager = make_manager()
    engine, draft = Engine(manager), Engine(manager, role="draft", pid=5)
    stranger = Engine(manager, name="other", role="draft", pid=6)
    half_written(engine)
    manager.client_exited(engine.epoch)
    stranger.acknowledge(Epoch(99))
    assert quarantined(manager) == [2, 2]
    draft.acknowledge(Epoch(99))
    assert quarantined(manager) == [0, 0]


def test_a_process_that_registers_again_speaks_for_its_older_epoch() -> None:
    manager = make_manager()
    engine = Engine(manager)
    half_written(engine)
    engine.register()
    assert quarantined(manager) == [2, 2]
    engine.acknowledge(engine.epoch)
    assert quarantined(manager) == [0, 0]


def test_what_a_dead_engine_published_is_found_by_the_next() -> None:
    manager = make_manager()
    engine = Engine(manager)
    half_written(engine)
    manager.client_exited(engine.epoch)
    engine.register()
    answer = engine.open(1, TEXT).opened[0]
    assert isinstance(answer, Opened)
    assert (answer.prefix_len, answer.draft_valid_from) == (4, 0)
    check(manager)


def test_draft_death_closes_no_request() -> None:
    manager = make_manager()
    engine, draft = Engine(manager), Engine(manager, role="draft", pid=5)
    half_written(engine)
    manager.client_exited(draft.epoch)
    engine.commit(1, 6)
    assert quarantined(manager) == [0, 0]


def test_leave_frees_everything_at_once() -> None:
    manager = make_manager()
    engine = Engine(manager)
    half_written(engine)
    engine.open(2, [9] * 8)
    engine.step(reserve=Reserve([ReqId(2)], [8]), done_step=0)
    engine.close(2)
    assert engine.leave() == Done()
    kinds = kinds_of(manager)
    assert [(k.num_private, k.num_limbo, k.num_quarantine, k.num_tree) for k in kinds] == [(0, 0, 0, 2)] * 2
    assert engine.leave() == Fenced(engine.epoch)
    check(manager)


def test_pages_from_quarantine_are_cleared_by_who_takes_them() -> None:
    manager = make_manager(8, [TARGET])
    engine = Engine(manager, kinds=("target_kv",))
    engine.open(1, TEXT, max_new=0)
    granted = engine.reserve(1, 8)
    manager.client_exited(engine.epoch)
    engine.register()
    engine.open(2, TEXT, max_new=0)
    again = engine.reserve(2, 8)
    # they were of this kind before, but the dead client may not have cleared them
    assert set(again.grow_pages) & set(granted.grow_pages)
    assert sorted(again.clear_pages) == sorted(again.grow_pages)
    engine.close(2)
    engine.step(done_step=engine.num)
    engine.open(3, TEXT, max_new=0)
    assert engine.reserve(3, 8).clear_pages == []


def test_a_remote_client_lives_by_its_lease_and_any_message_renews_it() -> None:
    clock = Clock()
    manager = MemoryManager(make_config(lease_ms=1000), clock=clock)
    engine = Engine(manager, pid=0)
    half_written(engine)
    for _ in range(3):
        clock.now += 0.9
        manager.tick()
        assert manager.handle(Renew(engine.epoch)) == Done()
    assert 0 < manager.tick() <= 1.0
    clock.now += 1.1
    manager.tick()
    assert engine.send() == Fenced(engine.epoch)
    assert quarantined(manager) == [0, 0]
    assert manager.handle_admin(Match(tokens=pack_tokens(TEXT))) == Matched(prefix_len=4, draft_valid_from=0)


def test_a_local_client_is_not_fenced_for_being_silent() -> None:
    clock = Clock()
    manager = MemoryManager(make_config(lease_ms=1000), clock=clock)
    engine = Engine(manager)
    clock.now += 3600
    manager.tick()
    assert isinstance(engine.send(), Stepped)


def test_a_replaced_remote_client_is_waited_for_until_its_lease_ends() -> None:
    clock = Clock()
    manager = MemoryManager(make_config(lease_ms=1000), clock=clock)
    engine = Engine(manager, pid=0)
    half_written(engine)
    clock.now += 0.5
    engine.register()
    assert quarantined(manager) == [2, 2]
    clock.now += 0.6
    manager.tick()
    assert quarantined(manager) == [0, 0]
    assert isinstance(engine.send(), Stepped)


def test_an_exit_is_told_once_and_again_without_harm() -> None:
    manager = make_manager()
    engine = Engine(manager)
    manager.client_exited(engine.epoch)
    manager.client_exited(engine.epoch)
    manager.client_exited(Epoch(50))
    assert isinstance(manager.handle(Step(engine.epoch, 1, 0, opens=[OpenReq(ReqId(1), b"", 1)])), Fenced)
