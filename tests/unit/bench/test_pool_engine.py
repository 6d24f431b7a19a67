"""The benchmark's scheduler and memories: everyone is served, and what is counted is what happens."""

import pytest

from memsvc.wire.admin import Check, CheckReport
from tests.bench.pool_engine import Engine
from tests.bench.pool_loads import Job
from tests.bench.pool_memory import SplitMemory
from tests.bench.pool_modes import GIB, MODES, NUM_DRAFTS, STATE_BYTES, STATE_LAYERS
from tests.support.pool_jobs import engine, job, run, text_of


def served(mode: str, arena_bytes: int, jobs: list[Job], ratio: float = 2.0) -> Engine:
    found = engine(mode, arena_bytes, jobs, ratio)
    for _ in range(4000):
        if found.record.num_finished == len(jobs):
            return found
        found.step()
    raise AssertionError(f"{found.record.num_finished} of {len(jobs)} finished")


@pytest.mark.parametrize("mode", MODES)
def test_everyone_is_served_and_the_pool_stays_sound(mode: str):
    jobs = [job(seed, 50 + 37 * seed, 20 + seed, 0.02 * seed) for seed in range(24)]
    done = served(mode, 6 * GIB, jobs)
    run(done, 2)
    report = done.memory.manager.handle_admin(Check())
    assert isinstance(report, CheckReport)
    assert (report.problems, report.leaked_bytes) == ([], 0)
    assert not done.running
    assert done.record.num_opened == 24 + done.record.num_retracts
    assert done.row()["arrived"] == 24


def test_states_of_a_split_pool_are_given_back():
    done = served("static-scratch", 6 * GIB, [job(seed, 100, 30) for seed in range(9)])
    assert isinstance(done.memory, SplitMemory)
    assert done.memory.states.num_running == 0
    assert (
        done.record.max_running
        == done.memory.states.num_admissible
        == int(4 * GIB // (10 * STATE_LAYERS * STATE_BYTES))
    )


def test_a_full_pool_retracts_and_serves_everyone_all_the_same():
    jobs = [job(seed, 1000, 1800) for seed in range(8)]
    done = served("unified", 3 * GIB, jobs)
    assert done.record.num_retracts > 0
    assert done.record.num_opened == 8 + done.record.num_retracts


@pytest.mark.parametrize("mode", ["unified", "static-ring", "padded-ring"])
def test_the_next_turn_goes_on_from_the_state_at_the_end_of_the_last_answer(mode: str):
    text = text_of(1, 3000)
    jobs = [Job(0.0, 1000, text[: 4 * 1400]), Job(9.0, 2000, text[: 4 * 2100])]
    done = served(mode, 4 * GIB, jobs)
    page = done.memory.page_size
    assert done.record.hit_tokens == 1399 // page * page


@pytest.mark.parametrize("mode", ["unified", "static-ring"])
def test_a_shared_prefix_without_a_state_is_no_hit_the_first_time_and_one_the_next(mode: str):
    head = text_of(1, 1600)
    jobs = [Job(10.0 * i, 2000, head + text_of(2 + i, 440)) for i in range(3)]
    done = served(mode, 4 * GIB, jobs)
    assert done.record.hit_tokens == 1600


def test_decoding_takes_a_step_for_four_tokens_and_prefill_a_chunk_a_step():
    done = engine("unified", 4 * GIB, [job(1, 4096, 41)])
    steps = 0
    while not done.record.num_finished:
        done.step()
        steps += 1
    # opened, then 2048 + 2032 before the last full page + 16, then 40 tokens, then closed
    assert steps == 1 + 3 + 10 + 1


def test_who_has_not_been_served_when_his_time_is_over_gives_up():
    late = job(2, 100, 30)
    late.gives_up_s = 0.3
    done = engine("static-scratch", 3 * GIB, [job(1, 100, 400), late], ratio=1.2)
    run(done, 30)
    assert done.record.num_gave_up == 1
    assert done.num_waiting == 0
    assert done.row()["wait_s"] == pytest.approx(0.3 / 2)


def test_means_are_of_the_steps_after_the_warm_up_only():
    done = engine("unified", 4 * GIB, [job(1, 100, 100)])
    run(done, 40)
    row = done.row()
    assert row["max_running"] == 1
    assert 26 / 40 <= row["mean_running"] <= 28 / 40
    assert done.record.mean_running(0.0, 0.5) == 1.0


def test_scratch_is_charged_for_every_running_request():
    done = engine("static-scratch", 6 * GIB, [job(seed, 100, 300) for seed in range(2)], ratio=2.0)
    run(done, 17)
    waste = done.row()["waste"]
    assert waste["scratch"]["state"] == 2 * (1 + NUM_DRAFTS) * STATE_LAYERS * STATE_BYTES
    padded = engine("padded", 6 * GIB, [job(seed, 100, 300) for seed in range(2)])
    run(padded, 17)
    assert padded.row()["waste"]["scratch"]["state"] == 2 * NUM_DRAFTS * STATE_LAYERS * STATE_BYTES


def test_a_request_that_no_pool_could_hold_is_counted_and_dropped():
    done = engine("static-ring", 4 * GIB, [job(1, 32_000, 30), job(2, 100, 30)], ratio=8.0)
    run(done, 30)
    assert done.record.num_too_large == 1
    assert done.record.num_finished == 1
