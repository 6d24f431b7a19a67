"""Both schedulers against the real memory manager, a toy model whose text shows every wrong page, and a toy draft."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from memsvc.core import COMPILED
from memsvc.core.growth import Growth
from memsvc.wire.admin import Flush
from memsvc.wire.base import FinishReason, ReqId, pack_tokens
from memsvc.wire.text import Admit, Sampling
from target_worker.admission import WaitingList
from target_worker.req import Req
from tests.support.pipelined_engine import PipelinedEngine
from tests.support.toy_engine import ToyEngine
from tests.support.toy_server import continuation
from tests.support.toy_texts import prompt, settle

Engine = ToyEngine | PipelinedEngine
Make = Callable[..., Engine]


@pytest.fixture(params=[ToyEngine, PipelinedEngine])
def make(request: pytest.FixtureRequest) -> Make:
    """A CPU engine, and one whose device is a step behind the host."""
    return request.param


@pytest.mark.parametrize("k", [0, 3])
def test_texts_equal_the_model_at_any_batch(make: Make, k: int) -> None:
    engine = make(num_frames=400, k=k, max_running=8)
    for rid in range(1, 21):
        engine.submit(rid, prompt(3 + rid % 11, rid % 7), 5 + rid % 17)
    engine.run()
    settle(engine)


def test_speculation_takes_fewer_steps(make: Make) -> None:
    steps = {}
    for k in (0, 3):
        engine = make(num_frames=400, k=k, wrong_every=1000)
        engine.submit(1, prompt(5, 1), 60)
        steps[k] = engine.run()
    assert steps[3] < steps[0] / 2
    assert engine.text.usages[ReqId(1)].accepted[3] > 5


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("num_frames", [14, 20, 34])
def test_a_pool_for_a_part_of_the_work_gives_the_same_texts(make: Make, k: int, num_frames: int) -> None:
    engine = make(num_frames=num_frames, k=k, max_running=8, max_prefill=40)
    for rid in range(1, 13):
        engine.submit(rid, prompt(10, rid % 5), 12)
    engine.run()
    assert engine.text.failed == {}
    settle(engine)


def test_a_second_turn_is_served_from_the_cache(make: Make) -> None:
    engine = make(num_frames=400, k=3)
    first = prompt(21, 1)
    engine.submit(1, first, 20)
    engine.run()
    second = first + engine.text.tokens[ReqId(1)] + prompt(5, 2)
    engine.submit(2, second, 20)
    before = engine.spec.num_context_tokens
    engine.run()
    cached = engine.text.usages[ReqId(2)].cached_tokens
    assert cached >= (len(first) + len(engine.text.tokens[ReqId(1)]) - 1) // 4 * 4
    # The draft reads the context of the first turn too, from its first block on.
    assert engine.spec.num_context_tokens - before >= len(second)
    settle(engine)


def test_a_request_too_large_for_the_pool_fails_with_numbers(make: Make) -> None:
    engine = make(num_frames=12)
    engine.submit(1, prompt(100, 1), 50)
    engine.submit(2, prompt(6, 2), 4)
    engine.run()
    assert "frames" in engine.text.failed[ReqId(1)]
    assert engine.text.finished[ReqId(2)] in (FinishReason.STOP, FinishReason.LENGTH)
    settle(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 9])
def test_an_abort_ends_a_request_wherever_it_stands(make: Make, num_steps: int) -> None:
    engine = make(num_frames=60, k=3, max_running=2)
    for rid in (1, 2, 3):
        engine.submit(rid, prompt(20, rid), 40)
    for _ in range(num_steps):
        engine.step()
    for rid in (1, 3):
        engine.abort(rid)
    engine.abort(99)
    engine.run()
    for rid in (1, 3):
        done = engine.text.tokens[ReqId(rid)] == continuation(prompt(20, rid), 40)
        assert done or engine.text.finished[ReqId(rid)] is FinishReason.ABORT
    settle(engine)


def test_a_resumed_request_goes_on_where_it_was(make: Make) -> None:
    engine = make(num_frames=60, k=3)
    engine.submit(1, prompt(9, 3), 30, out=11)
    engine.run()
    settle(engine)
    assert engine.text.usages[ReqId(1)].completion_tokens == len(engine.text.tokens[ReqId(1)])


def test_admit_that_asks_for_nothing_is_refused(make: Make) -> None:
    engine = make(num_frames=60)
    engine.submit(1, prompt(9, 3), 4, out=4)
    engine.run()
    assert "4 of 4 tokens" in engine.text.failed[ReqId(1)]


def test_higher_priority_is_opened_first(make: Make) -> None:
    engine = make(num_frames=60, max_running=1)
    for rid, priority in ((1, 0), (2, 0), (3, 5)):
        engine.submit(rid, prompt(9, rid), 4, priority=priority)
    engine.run()
    assert list(engine.text.finished) == [3, 1, 2]


@pytest.mark.skipif(COMPILED, reason="patches the allocator, which is compiled; make test runs it interpreted too")
def test_a_draft_that_returns_to_a_pool_without_room_gets_its_pages_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_growth: Growth, req: Any, out: Any) -> None:
        for kind, index in req.missing:
            out.remap.add(req, kind, index, 0)

    engine = make(num_frames=400, k=3, wrong_every=1000)
    for rid in (1, 2, 3):
        engine.submit(rid, prompt(9 + rid, rid), 60)
    for _ in range(6):
        engine.step()
    engine.spec.die()
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Growth, "refill", no_room)
        patch.setattr(Growth, "_fill", lambda _growth, _req, _ahead, _out: None)
        engine.spec.come_back()
        for _ in range(5):
            engine.step()
    engine.run()
    settle(engine)
    assert sum(engine.text.usages[ReqId(1)].accepted[1:]) > 8


def test_opens_of_one_step_are_limited_in_tokens() -> None:
    waiting = WaitingList()
    for rid in range(1, 5):
        sampling = Sampling(seed=0, max_tokens=9)
        waiting.push(Req.from_admit(Admit(ReqId(rid), pack_tokens([8] * 10), 10, sampling), rid))
    assert [req.rid for req in waiting.first(4, 25)] == [1, 2]
    assert [req.rid for req in waiting.first(4, 5)] == [3]
    assert [req.rid for req in waiting.first(4, 5)] == [4]
    assert waiting.first(4, 5) == []


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_with_draft_deaths_and_aborts(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    k = rng.choice([0, 1, 3, 7])
    engine = make(num_frames=rng.choice([18, 26, 40, 90]), k=k, max_running=6, wrong_every=rng.choice([2, 5]))
    for rid in range(1, 40):
        base = prompt(rng.randrange(1, 12), rng.randrange(3))
        engine.submit(rid, base + prompt(rng.randrange(0, 8), rid), rng.randrange(1, 16), priority=rng.randrange(2))
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.2:
            engine.abort(rng.randrange(1, rid + 1))
        if engine.spec is not None and rng.random() < 0.1:
            engine.spec.die()
        if engine.spec is not None and rng.random() < 0.3:
            engine.spec.come_back()
        if rng.random() < 0.05:
            engine.manager.handle_admin(Flush())
    engine.run()
    assert engine.text.failed == {}
    settle(engine)
