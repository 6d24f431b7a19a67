"""The pipelined scheduler of a hybrid target: real memory manager, a toy device whose states show every wrong page."""

from collections.abc import Callable

import pytest
from msgspec import structs

from memsvc.wire.admin import Check, GetStats
from memsvc.wire.base import ReqId
from tests.support.pipelined_engine import PipelinedEngine
from tests.support.pipelined_load import Load
from tests.support.toy_server import continuation
from tests.support.toy_texts import prompt, settle

LOADS: dict[str, Callable[[int], Load]] = {
    "late": lambda seed: Load(seed, recurrent=True),
    "early": lambda seed: Load(seed, recurrent=True, is_late=False),
    "drafts die": lambda seed: Load(seed, recurrent=True, deaths=0.03, is_late=seed % 2 > 0),
    "memory is demanded": lambda seed: Load(seed, recurrent=True, demands=0.05, is_late=seed % 3 > 0),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("load", LOADS)
def test_random_loads_give_the_texts_and_all_pages_back(load: str, seed: int) -> None:
    engine = LOADS[load](seed).run()
    assert engine.states is not None
    assert engine.states.num_reads > 0
    assert engine.manager.handle_admin(GetStats()).num_frozen > 0
    assert not engine.manager.handle_admin(Check()).problems


@pytest.mark.parametrize("num_out", range(13, 20))
@pytest.mark.parametrize("k", [0, 3])
def test_a_second_turn_goes_on_from_the_last_full_page_of_the_first_answer(k: int, num_out: int) -> None:
    engine = PipelinedEngine(num_frames=80, k=k, recurrent=True, wrong_every=0)
    engine.submit(1, prompt(21, 1), num_out)
    engine.run()
    first = prompt(21, 1) + continuation(prompt(21, 1), num_out)
    engine.submit(2, [*first, 9, 9, 9], 5)
    engine.run()
    computed = len(first) - 1  # the last token of an answer is never computed
    assert engine.text.usages[ReqId(2)].cached_tokens == computed // 4 * 4
    settle(engine)


def test_a_shared_beginning_is_reused_from_the_third_request_on() -> None:
    engine = PipelinedEngine(num_frames=120, recurrent=True)
    for rid in (1, 2, 3):
        engine.submit(rid, prompt(14, 1) + prompt(9, 10 + rid), 3)
        engine.run()
    assert [engine.text.usages[ReqId(rid)].cached_tokens for rid in (1, 2, 3)] == [0, 0, 12]
    settle(engine)


def test_a_state_that_is_behind_at_the_end_holds_up_no_step() -> None:
    engine = PipelinedEngine(num_frames=200, k=3, recurrent=True, wrong_every=0)
    assert engine.states is not None
    engine.submit(1, prompt(5, 1), 90)
    engine.submit(2, prompt(6, 2), 8)
    while ReqId(2) not in engine.text.finished:
        engine.step()
    while engine.scheduler.counters.num_steps and len(engine.scheduler._running) > 1:
        assert not engine.device.is_empty("target"), "a step is under way while the other's state catches up"
        engine.step()
    assert engine.states.num_caught_up == 1
    engine.run()
    settle(engine)


@pytest.mark.parametrize("k", [3, 7])
@pytest.mark.parametrize("num_reqs", [2, 3])
def test_steps_that_only_make_room_take_no_state_away_that_is_still_read(k: int, num_reqs: int) -> None:
    engine = PipelinedEngine(num_frames=30, recurrent=True, k=k, max_running=num_reqs, wrong_every=0)
    for rid in range(1, num_reqs + 1):
        engine.submit(rid, prompt(9 + rid % 2, rid), 40)
    engine.run()
    assert engine.text.stats is not None
    assert engine.text.stats.num_retracts > 0
    settle(engine)


@pytest.mark.parametrize("num_steps", range(3, 14))
def test_a_request_that_is_aborted_at_any_step_gives_away_no_state_that_went_on(num_steps: int) -> None:
    engine = PipelinedEngine(num_frames=100, k=3, recurrent=True, max_prefill=6, wrong_every=0)
    engine.submit(1, prompt(21, 1), 30)
    for _ in range(num_steps):
        engine.step()
    engine.abort(1)
    engine.submit(2, prompt(21, 1), 9)
    engine.run()
    # What the chunk left that was under way counts for nothing.
    assert engine.text.usages[ReqId(2)].cached_tokens >= (8 if num_steps > 5 else 0)
    settle(engine)


@pytest.mark.parametrize("num_steps", range(5, 13))
def test_a_request_that_is_demanded_back_goes_on_from_its_state(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PipelinedEngine(num_frames=400, k=3, recurrent=True, wrong_every=0)
    engine.submit(1, prompt(9, 1), 60)
    for _ in range(num_steps):
        engine.step()
    finish = engine.client.finish_step
    with monkeypatch.context() as patch:
        patch.setattr(engine.client, "finish_step", lambda: structs.replace(finish(), retract=[ReqId(1)]))
        engine.step()
    engine.run()
    assert engine.text.usages[ReqId(1)].num_retracts == 1
    engine.check_accounts()
    settle(engine)
