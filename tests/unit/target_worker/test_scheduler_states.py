"""The schedulers of a hybrid target: real memory manager, toy states whose text shows every wrong page."""

import random

import pytest

from memsvc.wire.admin import Check, GetStats
from memsvc.wire.base import ReqId
from tests.support.pipelined_engine import PipelinedEngine
from tests.support.toy_engine import ToyEngine
from tests.support.toy_server import continuation
from tests.support.toy_texts import prompt, settle

either = pytest.mark.parametrize("make", [ToyEngine, PipelinedEngine], ids=["step by step", "pipelined"])
Make = type[ToyEngine] | type[PipelinedEngine]


@pytest.mark.parametrize("k", [0, 3])
def test_one_request_is_generated(k: int) -> None:
    engine = ToyEngine(num_frames=60, k=k, recurrent=True)
    engine.submit(1, prompt(21, 1), 30)
    engine.run()
    settle(engine)


@either
@pytest.mark.parametrize("num_out", range(13, 20))
@pytest.mark.parametrize("k", [0, 3])
def test_a_second_turn_goes_on_from_the_last_full_page_of_the_first_answer(make: Make, k: int, num_out: int) -> None:
    engine = make(num_frames=80, k=k, recurrent=True, wrong_every=1000)
    engine.submit(1, prompt(21, 1), num_out)
    engine.run()
    first = prompt(21, 1) + continuation(prompt(21, 1), num_out)
    engine.submit(2, [*first, 9, 9, 9], 5)
    engine.run()
    engine.check_texts()
    computed = len(first) - 1  # the last token of an answer is never computed
    assert engine.text.usages[ReqId(2)].cached_tokens == computed // 4 * 4
    settle(engine)


def test_the_same_prompt_again_computes_only_its_last_tokens() -> None:
    for length in (24, 25, 27):
        engine = ToyEngine(num_frames=80, recurrent=True)
        for rid in (1, 2):
            engine.submit(rid, prompt(length, 1), 3)
            engine.run()
        assert engine.text.usages[ReqId(2)].cached_tokens == (length - 1) // 4 * 4, length
        settle(engine)


@either
def test_a_shared_beginning_is_reused_from_the_third_request_on(make: Make) -> None:
    engine = make(num_frames=120, recurrent=True)
    for rid in (1, 2, 3):
        engine.submit(rid, prompt(14, 1) + prompt(9, 10 + rid), 3)
        engine.run()
    assert [engine.text.usages[ReqId(rid)].cached_tokens for rid in (1, 2, 3)] == [0, 0, 12]
    settle(engine)


def test_a_retracted_request_goes_on_where_it_was() -> None:
    engine = ToyEngine(num_frames=26, recurrent=True, k=3, max_running=3)
    for rid in (1, 2, 3):
        engine.submit(rid, prompt(10, rid), 30)
    engine.run()
    stats = engine.text.stats
    assert stats is not None
    assert stats.num_retracts > 0
    engine.check_texts()
    assert not engine.manager.handle_admin(Check()).problems


@either
@pytest.mark.parametrize("k", [3, 7])
@pytest.mark.parametrize("num_reqs", [2, 3])
def test_steps_that_only_make_room_take_no_state_away_that_is_still_read(make: Make, k: int, num_reqs: int) -> None:
    # Drafts carry requests past the page in which their last checkpoint stands, and no forward follows.
    engine = make(num_frames=30, recurrent=True, k=k, max_running=num_reqs, wrong_every=1000)
    for rid in range(1, num_reqs + 1):
        engine.submit(rid, prompt(9 + rid % 2, rid), 40)
    engine.run()
    assert engine.text.stats is not None
    assert engine.text.stats.num_retracts > 0
    settle(engine)


def test_a_draft_that_comes_back_zeroes_no_page_that_has_become_another_kinds() -> None:
    engine = ToyEngine(num_frames=34, recurrent=True, k=3, max_running=3)
    assert engine.spec is not None
    engine.spec.die()
    for rid in range(1, 9):
        engine.submit(rid, prompt(10, rid), 20)
    for _ in range(60):
        engine.scheduler.step()
    assert engine.text.finished
    assert not engine.scheduler.is_idle
    engine.spec.come_back()
    engine.run()
    settle(engine)


@pytest.mark.parametrize("seed", range(24))
def test_random_loads_with_shared_prompts_draft_deaths_and_aborts(seed: int) -> None:
    rng = random.Random(seed)
    k = rng.choice([0, 0, 1, 3, 7])
    frames = rng.choice([26, 34, 50, 100])
    engine = ToyEngine(
        num_frames=frames, k=k, max_running=6, wrong_every=rng.choice([2, 5, 1000]), recurrent=True,
        max_prefill=rng.choice([6, 16, 32]),
    )  # fmt: skip
    texts = [prompt(rng.randrange(1, 14), seed) for seed in range(3)]
    for rid in range(1, 40):
        base = rng.choice(texts)
        text = base + prompt(rng.randrange(0, 9), rid)
        if rng.random() < 0.5:
            text += prompt(-len(text) % 4, rid + 100)  # ends on a page edge
        engine.submit(rid, text or [9], rng.randrange(1, 16), priority=rng.randrange(2))
        if rng.random() < 0.4:
            texts[rng.randrange(3)] = (text + continuation(text, 9))[:24]
        for _ in range(rng.randrange(6)):
            engine.scheduler.step()
        if rng.random() < 0.2:
            engine.abort(rng.randrange(1, rid + 1))
        if k and rng.random() < 0.1:
            engine.spec.die()
        elif k and rng.random() < 0.3:
            engine.spec.come_back()
    engine.run()
    settle(engine)
    stats = engine.manager.handle_admin(GetStats())
    assert stats.num_frozen > 0


def test_the_states_are_really_read() -> None:
    engine = ToyEngine(num_frames=80, recurrent=True)
    engine.submit(1, prompt(21, 1), 17)
    engine.run()
    assert engine.states is not None
    assert engine.states.num_reads > 20
