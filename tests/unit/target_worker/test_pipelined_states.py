"""The pipelined scheduler of a hybrid target: real memory manager, a toy device whose states show every wrong page."""

from collections.abc import Callable

import pytest

from memsvc.wire.admin import Check, GetStats
from memsvc.wire.base import ReqId
from tests.support.pipelined_engine import PipelinedEngine
from tests.support.pipelined_load import Load
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
def test_a_request_that_is_demanded_back_goes_on_from_its_state(num_steps: int) -> None:
    engine = PipelinedEngine(num_frames=400, k=3, recurrent=True, wrong_every=0)
    engine.submit(1, prompt(9, 1), 60)
    for _ in range(num_steps):
        engine.step()
    engine.step_demanding(1)
    engine.run()
    assert engine.text.usages[ReqId(1)].num_retracts == 1
    engine.check_accounts()
    settle(engine)
