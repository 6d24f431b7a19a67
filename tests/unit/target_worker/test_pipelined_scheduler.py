"""The pipelined scheduler on a toy device that runs things as late as anybody may, or at random as early as it may.

The memory manager, the links and the checks of the draft are the real ones.
"""

from collections.abc import Callable

import pytest
from msgspec import structs

from memsvc.wire.base import ReqId
from target_worker.cuda import scheduler as scheduler_module
from target_worker.width import AutoWidth
from tests.support.pipelined_engine import PipelinedEngine
from tests.support.pipelined_load import Load
from tests.support.toy_engine import ToyEngine
from tests.support.toy_server import ToyServer
from tests.support.toy_texts import prompt, settle
from tests.support.width_rig import Forced

LOADS: dict[str, Callable[[int], Load]] = {
    "late": lambda seed: Load(seed),
    "early": lambda seed: Load(seed, is_late=False),
    "drafts die": lambda seed: Load(seed, deaths=0.02),
    "drafts die early": lambda seed: Load(seed, deaths=0.08, is_late=False),
    "drafts refuse": lambda seed: Load(seed, deaths=0.01, refusals=0.05),
    "memory is demanded": lambda seed: Load(seed, demands=0.05, deaths=0.01 * (seed % 2), is_late=seed % 3 > 0),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("load", LOADS)
def test_random_loads_give_the_texts_and_all_pages_back(load: str, seed: int) -> None:
    LOADS[load](seed).run()


def run(engine: ToyServer) -> ToyServer:
    """Prompts of one chunk and of several, answers that end by length and by a stop token."""
    for rid in range(1, 13):
        engine.submit(rid, prompt(3 + 5 * rid % 50, rid), 5 + rid * 7 % 40)
    engine.run()
    settle(engine)
    return engine


@pytest.mark.parametrize("never", [False, True])
@pytest.mark.parametrize("k", [1, 5])
def test_accounts_of_drafts_are_those_of_the_cpu(k: int, never: bool) -> None:
    pipelined = PipelinedEngine(num_frames=900, k=k, max_running=12, max_prefill=30, wrong_every=0 if never else 1)
    cpu = ToyEngine(num_frames=900, k=k, max_running=12, max_prefill=120, wrong_every=10**9 if never else 1)
    assert run(pipelined).text.usages == run(cpu).text.usages
    pipelined.check_accounts()


def test_a_step_is_submitted_before_the_one_ahead_of_it_is_read() -> None:
    engine = PipelinedEngine(num_frames=400, k=3, wrong_every=0)
    engine.submit(1, prompt(5, 1), 60)
    engine.step()
    while not engine.scheduler.is_idle:
        engine.step()
        if engine.text.tokens[ReqId(1)] and ReqId(1) not in engine.text.finished:
            assert not engine.device.is_empty("target"), "nothing runs while the host works"
    engine.step()
    settle(engine)


def test_steps_of_one_request_are_no_more_than_on_the_cpu_but_for_the_one_that_is_ahead() -> None:
    steps = {}
    for make in (ToyEngine, PipelinedEngine):
        engine = make(num_frames=400, k=3, wrong_every=10**9)
        engine.submit(1, prompt(5, 1), 60)
        engine.run()
        steps[make] = engine.scheduler.counters.num_steps
    assert steps[PipelinedEngine] == steps[ToyEngine] + 1


@pytest.mark.parametrize("seed", [0, 1])
def test_prompts_of_several_chunks_with_two_flights_out(seed: int) -> None:
    engine = PipelinedEngine(num_frames=400, k=3, max_prefill=7, seed=seed)
    for rid in range(1, 6):
        engine.submit(rid, prompt(40 + rid, rid), 9)
    engine.run()
    settle(engine)


@pytest.mark.parametrize("num_down", [0, 2])
@pytest.mark.parametrize("num_steps", range(2, 14))
def test_a_draft_that_dies_and_returns_at_any_step_reads_only_what_is_there(num_steps: int, num_down: int) -> None:
    engine = PipelinedEngine(num_frames=400, k=3, wrong_every=0)
    assert engine.spec is not None
    for rid in (1, 2, 3):
        engine.submit(rid, prompt(9 + rid, rid), 8 + 2 * rid)
    for _ in range(num_steps):
        engine.step()
    engine.spec.die()
    for _ in range(num_down):
        engine.step()
    engine.spec.come_back()
    engine.run()
    answers = dict(engine.text.tokens)
    # Of what the first draft was told, only what it has written is in the cache: other turns read that.
    before = engine.spec.num_context_tokens
    for rid in (1, 2, 3):
        turn = prompt(9 + rid, rid) + answers[ReqId(rid)] + prompt(5, 9)
        engine.submit(rid + 3, turn, 20)
    engine.run()
    assert engine.spec.num_context_tokens > before
    settle(engine)


def test_a_refused_plan_that_a_step_waits_for_does_not_hold_up_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PipelinedEngine(num_frames=400, k=3, wrong_every=0)
    assert engine.spec is not None
    monkeypatch.setattr(scheduler_module, "HANG_S", 0.05)
    for rid in (1, 2):
        engine.submit(rid, prompt(9, rid), 40)
    for _ in range(6):
        engine.step()
    engine.spec.refuses = True
    engine.step()
    finish = engine.client.finish_step
    monkeypatch.setattr(engine.client, "finish_step", lambda: structs.replace(finish(), retract=[ReqId(1)]))
    engine.step()
    monkeypatch.undo()
    assert engine.spec.num_refused == 1
    assert engine.spec.alive, "nothing hung"
    engine.run()
    assert engine.text.usages[ReqId(1)].num_retracts == 1
    settle(engine)


def test_a_second_turn_finds_the_context_of_the_last_block_too() -> None:
    engine = PipelinedEngine(num_frames=400, k=3)
    assert engine.spec is not None
    first = prompt(21, 1)
    engine.submit(1, first, 20)
    engine.run()
    second = first + engine.text.tokens[ReqId(1)] + prompt(5, 2)
    engine.submit(2, second, 20)
    engine.spec.contexts.clear()
    engine.run()
    assert engine.text.usages[ReqId(2)].cached_tokens >= (len(first) + len(engine.text.tokens[ReqId(1)]) - 1) // 4 * 4
    assert {first for first, _ in engine.spec.contexts} == {0}
    settle(engine)


@pytest.mark.parametrize("num_steps", range(5, 13))
def test_a_request_that_is_demanded_back_finds_its_context_again(num_steps: int) -> None:
    engine = PipelinedEngine(num_frames=400, k=3, wrong_every=0)
    assert engine.spec is not None
    engine.submit(1, prompt(9, 1), 60)
    for _ in range(num_steps):
        engine.step()
    engine.step_demanding(1)
    engine.run()
    assert engine.text.usages[ReqId(1)].num_retracts == 1
    assert {first for first, _ in engine.spec.contexts} == {0}
    engine.check_accounts()
    settle(engine)


def test_plain_steps_with_a_draft_still_write_its_context() -> None:
    engine = PipelinedEngine(num_frames=400, k=7, wrong_every=0, width=Forced(lambda step: 7 * (step % 9 == 8)))
    assert engine.spec is not None
    engine.submit(1, prompt(5, 3), 150)
    engine.run()
    settle(engine)
    assert engine.spec.num_context_tokens > 500
    engine.check_accounts()


def test_a_draft_that_never_ends_its_turn_is_killed_and_texts_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PipelinedEngine(num_frames=400, k=3, wrong_every=0)
    assert engine.spec is not None
    draft = engine.spec
    engine.submit(1, prompt(5, 1), 30)
    for _ in range(6):
        engine.step()
    engine.device.put_wait("draft", "target", 10**6)
    monkeypatch.setattr(scheduler_module, "HANG_S", 0.01)
    engine.run()
    assert not draft.alive
    settle(engine)


def test_a_device_that_never_ends_a_step_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PipelinedEngine(num_frames=400)
    engine.submit(1, prompt(5, 1), 30)
    for _ in range(4):
        engine.step()
    engine.device.put_wait("target", "draft", 10**6)
    monkeypatch.setattr(scheduler_module, "HANG_S", 0.01)
    with pytest.raises(RuntimeError, match="not over"):
        engine.run()


def test_steps_without_the_drafts_planned_for_them_do_not_count_for_the_width() -> None:
    seen: list[int] = []

    class Watching(Forced):
        def observe_step(self, num_reqs: int, num_drafts: int, num_tokens: int, prompt_rows: int, seconds: float):
            seen.append(num_drafts)

    engine = PipelinedEngine(num_frames=400, k=3, width=Watching(lambda _step: 3))
    assert engine.spec is not None
    engine.submit(1, prompt(5, 1), 200)
    for _ in range(20):
        engine.step()
    engine.spec.die()
    for _ in range(20):
        engine.step()
    engine.spec.come_back()
    engine.run()
    assert len(seen) > 20
    # The one that was planned without the draft, and run with it.
    assert seen.count(0) <= 1
    assert set(seen) == {0, 3}


def test_a_width_chosen_by_measurement_gives_the_same_texts() -> None:
    engine = PipelinedEngine(num_frames=400, k=7, max_running=8, width=AutoWidth((0, 1, 3, 7)))
    for rid in range(1, 30):
        engine.submit(rid, prompt(6, rid), 40)
    engine.run()
    engine.check_accounts()
    settle(engine)


def test_idle_the_lane_is_at_rest_and_memory_is_told_so() -> None:
    engine = PipelinedEngine(num_frames=100, k=3)
    engine.submit(1, prompt(5, 1), 20)
    engine.run()
    assert engine.device.is_empty("target")
    assert engine.device.is_empty("draft")
    settle(engine)
