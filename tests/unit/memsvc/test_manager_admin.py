"""The operator's side: match, pins, stats, snapshot, the invariant check and its idle slices."""

import logging
from typing import Any

import pytest

from memsvc.core.manager import MemoryManager
from memsvc.core.page_states import LIMBO
from memsvc.wire.admin import (
    Check,
    CheckReport,
    Flush,
    GetStats,
    Match,
    Matched,
    Pin,
    Pinned,
    Snapshot,
    SnapshotReport,
    Stats,
    Unpin,
)
from memsvc.wire.base import BadRequest, Done, pack_tokens
from tests.support.mem_builders import Clock, Engine, check, make_config, make_manager

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


def stats_of(manager: MemoryManager) -> Stats:
    stats = manager.handle_admin(GetStats())
    assert isinstance(stats, Stats)
    return stats


def cached_text(**config: Any) -> tuple[MemoryManager, Engine, Clock]:
    clock = Clock()
    manager = MemoryManager(make_config(16, pin_budget_frames=4, **config), clock=clock)
    engine = Engine(manager)
    engine.run(1, TEXT, max_new=0)
    engine.close(1)
    return manager, engine, clock


def test_match_counts_whole_pages_over_all_models() -> None:
    manager, _, _ = cached_text()
    assert manager.handle_admin(Match(pack_tokens(TEXT))) == Matched(prefix_len=8, draft_valid_from=0)
    assert manager.handle_admin(Match(pack_tokens([*TEXT[:5], 0, 0]))) == Matched(prefix_len=4, draft_valid_from=0)
    assert manager.handle_admin(Match(pack_tokens(TEXT), salt="s")) == Matched(prefix_len=0, draft_valid_from=0)
    assert isinstance(manager.handle_admin(Match(b"abc")), BadRequest)


def test_a_pin_survives_a_flush_and_ends_with_its_time() -> None:
    manager, _, clock = cached_text()
    assert manager.handle_admin(Pin("p", pack_tokens(TEXT[:5]), ttl_s=10)) == Pinned(pinned_len=4, budget_left=2)
    check(manager)
    assert [kind.num_pinned for kind in stats_of(manager).kinds] == [2, 2]
    manager.handle_admin(Flush())
    assert manager.handle_admin(Match(pack_tokens(TEXT))) == Matched(prefix_len=4, draft_valid_from=0)
    clock.now += 11
    manager.tick()
    check(manager)
    manager.handle_admin(Flush())
    assert manager.handle_admin(Match(pack_tokens(TEXT))) == Matched(prefix_len=0, draft_valid_from=0)


def test_two_pins_of_one_text_end_one_by_one() -> None:
    manager, _, _ = cached_text()
    for name in "ab":
        manager.handle_admin(Pin(name, pack_tokens(TEXT), ttl_s=10))
    assert manager.handle_admin(Unpin("a")) == Done()
    check(manager)
    assert [kind.num_pinned for kind in stats_of(manager).kinds] == [4, 4]
    assert manager.handle_admin(Unpin("b")) == Done()
    assert [kind.num_pinned for kind in stats_of(manager).kinds] == [0, 0]
    missing = manager.handle_admin(Unpin("b"))
    assert isinstance(missing, BadRequest)
    check(manager)


def test_a_pin_past_the_budget_is_refused_with_both_numbers() -> None:
    manager, engine, _ = cached_text()
    engine.run(2, [20] * 12, max_new=0)
    reply = manager.handle_admin(Pin("p", pack_tokens([20] * 12), ttl_s=10))
    assert isinstance(reply, BadRequest)
    assert "5 frames, the budget is 4" in reply.reason
    check(manager)


@pytest.mark.parametrize(
    ("pin", "text"),
    [
        (Pin("p", pack_tokens([9, 9]), ttl_s=1), "nothing of these 2 tokens is cached"),
        (Pin("p", pack_tokens(TEXT), ttl_s=0), "ttl_s is 0"),
        (Pin("p", pack_tokens(TEXT), ttl_s=float("nan")), "ttl_s is nan"),
        (Pin("p", pack_tokens(TEXT), ttl_s=float("inf")), "ttl_s is inf"),
        (Pin("p", pack_tokens(TEXT), ttl_s=366 * 86400), "at most 3.1536e+07"),
        (Pin("p", b"abcde", ttl_s=1), "5 bytes of tokens"),
    ],
)
def test_a_pin_of_nothing_is_refused(pin: Pin, text: str) -> None:
    manager, _, _ = cached_text()
    reply = manager.handle_admin(pin)
    assert isinstance(reply, BadRequest)
    assert text in reply.reason


def test_stats_sum_to_the_arena() -> None:
    manager, engine, _ = cached_text(exchange_bytes=2000, shared_bytes=1)
    engine.open(2, [*TEXT, 9], max_new=0)
    engine.reserve(2, 5)
    stats = stats_of(manager)
    frames = stats.frames_dummy + stats.frames_exchange + stats.frames_shared + stats.frames_empty
    assert frames + sum(kind.num_frames for kind in stats.kinds) == stats.num_frames == 16
    for kind in stats.kinds:
        states = (kind.num_free, kind.num_private, kind.num_tree, kind.num_pinned, kind.num_limbo, kind.num_quarantine)
        assert sum(states) == kind.num_pages_cut
    assert stats.unusable_bytes == sum(kind.num_free * kind.page_bytes for kind in stats.kinds)
    assert (stats.num_reqs, stats.elder, stats.num_clients) == (1, 2, 1)
    assert (stats.num_opens, stats.num_closes, stats.num_steps) == (2, {"finish": 1}, 6)
    assert stats.step_seconds > 0


def test_snapshot_says_who_holds_what() -> None:
    manager, engine, clock = cached_text()
    engine.open(2, [*TEXT, 9], priority=3)
    engine.reserve(2, 5)
    engine.commit(2, 9, draft=8)
    clock.now += 7
    manager.handle_admin(Pin("p", pack_tokens(TEXT), ttl_s=10))
    report = manager.handle_admin(Snapshot())
    assert isinstance(report, SnapshotReport)
    [info] = report.reqs
    assert (info.rid, info.engine, info.priority, info.age_s) == (2, "e", 3, 7)
    assert (info.committed_len, info.draft_len, info.draft_valid_from) == (9, 8, 0)
    assert info.num_pages == [7, 7]
    assert (report.num_tree_tokens, report.pins) == (8, {"p": 8})
    check(manager)


# --- the check itself must see faults; each of these plants one ---


def found(manager: MemoryManager) -> str:
    report = manager.handle_admin(Check())
    assert isinstance(report, CheckReport)
    return "\n".join(f"{p.kind} {p.page} {p.state} {p.owner} {p.age_s}: {p.what}" for p in report.problems)


def faulty() -> tuple[MemoryManager, Engine]:
    manager, engine, clock = cached_text()
    engine.open(7, [20] * 8)
    engine.reserve(7, 8)
    clock.now += 5
    check(manager)
    return manager, engine


def test_check_names_the_last_owner_and_the_age_of_a_lost_page() -> None:
    manager, engine = faulty()
    table = next(iter(manager._running)).tables[0]
    page = table.pop()
    assert f"target_kv {page} private rid 7 of e 5.0: is private and nobody has it" in found(manager)
    table.append(page)
    engine.close(7)
    client = next(iter(manager._sessions.clients.values()))
    _, kind, page = client.limbo.pop()
    report = manager.handle_admin(Check())
    assert isinstance(report, CheckReport)
    assert "closed request" in found(manager)
    assert report.leaked_bytes == manager.layout.kinds[kind].page_bytes


def test_check_sees_a_page_with_two_owners() -> None:
    manager, _ = faulty()
    table = next(iter(manager._running)).tables[1]
    table[0] = table[1]
    assert "has two owners: private and private" in found(manager)


def test_check_sees_a_table_that_has_left_the_tree() -> None:
    manager, engine = faulty()
    engine.commit(7, 4)
    table = next(iter(manager._running)).tables[0]
    table[0], table[1] = table[1], table[0]
    assert "rid 7: its table and the path to its node have different pages" in found(manager)


def test_check_sees_wrong_counts() -> None:
    for break_it in (
        lambda pool: pool.spare.__setitem__(0, pool.spare[0] + 1),
        lambda pool: setattr(pool, "num_loose", pool.num_loose + 1),
        lambda pool: pool.counts[1].__setitem__(LIMBO, 3),
        lambda pool: pool.num_cut.__setitem__(0, 9),
    ):
        manager, _ = faulty()
        break_it(manager._store.pool)
        assert "counted as" in found(manager) or "reserved of" in found(manager)


def test_check_sees_wrong_locks() -> None:
    manager, engine = faulty()
    engine.open(8, [*TEXT, 9])
    req = list(manager._running)[-1]
    manager._store.pool.refs[1][req.tables[1][0]] += 1
    assert "counts 2 locks, 1 hold it" in found(manager)
    req.node.lock_ref += 1
    assert "node at page 0 counts 2 locks, 1 hold it" in found(manager)


def test_check_sees_a_frame_in_the_wrong_list() -> None:
    manager, _ = faulty()
    pool = manager._store.pool
    frame = pool.locked_holes.fullest(1)
    pool.locked_holes.remove(1, frame, pool.num_free[frame])
    assert "frames have free pages" in found(manager)
    pool.loose_holes.add(1, frame, pool.num_free[frame])
    assert "frame is in the list of loose ones" in found(manager)


def test_check_sees_text_that_eviction_cannot_reach() -> None:
    manager, _ = faulty()
    manager._store.queue.pop()
    assert "is not queued for eviction" in found(manager)


def test_check_sees_a_broken_free_list() -> None:
    manager, _ = faulty()
    pool = manager._store.pool
    frame = pool.locked_holes.fullest(1)
    pool.num_handed[frame] += 1
    assert "frame lists" in found(manager)


def test_the_idle_check_runs_in_slices_once_and_logs_what_it_finds(caplog: pytest.LogCaptureFixture) -> None:
    class Ticking(Clock):
        step = 0.0

        def __call__(self) -> float:
            self.now += self.step
            return self.now

    clock = Ticking()
    manager = MemoryManager(make_config(16), clock=clock)
    engine = Engine(manager)
    engine.run(1, TEXT, max_new=0)
    engine.reserve(1, 4)
    next(iter(manager._running)).tables[0].pop()
    assert manager.tick() == 1.0
    clock.now += 0.9
    assert 0 < manager.tick() < 0.11
    clock.now += 0.2
    clock.step = 0.0015
    slices = 0
    with caplog.at_level(logging.ERROR):
        while (wait := manager.tick()) < 1.0:
            assert wait <= 0.02
            slices += 1
    assert slices > 1
    assert any("nobody has it" in record.message for record in caplog.records)
    count = len(caplog.records)
    clock.now += 10
    assert manager.tick() == 1.0
    assert len(caplog.records) == count


def test_a_change_starts_the_idle_check_anew_and_reading_does_not() -> None:
    manager, engine, clock = cached_text()
    clock.now += 2
    manager.tick()
    assert manager._checked
    manager.handle_admin(GetStats())
    assert manager._checked
    engine.step()
    assert not manager._checked


def test_plan_lines_are_those_of_the_geometry() -> None:
    lines = make_manager().plan_lines()
    assert lines[1].startswith("kind target_kv: 768 bytes a page (2 tokens), 2 pages a frame")
