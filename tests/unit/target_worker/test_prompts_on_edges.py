"""Prompts of a hybrid target that end on a page edge: one chunk, a checkpoint a page before, and nobody held up."""

from collections.abc import Callable
from typing import Any

import pytest

from memsvc.wire.admin import GetStats
from memsvc.wire.base import ReqId
from target_worker.plan import StepPlan
from tests.support.pipelined_engine import PipelinedEngine
from tests.support.toy_engine import ToyEngine
from tests.support.toy_texts import prompt, settle

Engine = ToyEngine | PipelinedEngine
LENGTHS = [(4, length) for length in range(15, 20)] + [(16, length) for length in (15, 16, 17, 32, 33)]
"""Page sizes and prompt lengths."""


@pytest.fixture(params=["step by step", "late", "early"])
def make(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """A CPU engine, and one whose device does things as late as it may, or soon."""

    def made(**options: Any) -> Engine:
        options = {"num_frames": 200, "recurrent": True, "max_prefill": 40, "wrong_every": 1000} | options
        if request.param == "step by step":
            return ToyEngine(**options)
        return PipelinedEngine(**options, seed=int(request.param == "early"))

    return made


def chunks_of(engine: Engine) -> dict[int, list[int]]:
    """Rows of the prompt chunks that are computed from now on, by request."""
    name = "run" if isinstance(engine, ToyEngine) else "submit"
    plain, found = getattr(engine.executor, name), {}

    def noted(plan: StepPlan, *args: Any) -> Any:
        for req, num in plan.chunks.items():
            found.setdefault(int(req.rid), []).append(num)
        return plain(plan, *args)

    setattr(engine.executor, name, noted)
    return found


def cached(engine: Engine, rid: int) -> int:
    return engine.text.usages[ReqId(rid)].cached_tokens


@pytest.mark.parametrize("num_out", [1, 2, 11])
@pytest.mark.parametrize("k", [0, 1, 3, 8])
@pytest.mark.parametrize(("page_size", "length"), LENGTHS)
def test_a_prompt_is_one_chunk_and_a_second_one_goes_on_before_its_last_token(
    make: Callable[..., Engine], page_size: int, length: int, k: int, num_out: int
) -> None:
    engine = make(page_size=page_size, k=k)
    chunks = chunks_of(engine)
    for rid in (1, 2, 3):
        engine.submit(rid, prompt(length, 1), num_out)
        engine.run()
    hit = (length - 1) // page_size * page_size
    assert chunks == {1: [length], 2: [length - hit], 3: [length - hit]}
    assert (cached(engine, 2), cached(engine, 3)) == (hit, hit)
    settle(engine)


@pytest.mark.parametrize("k", [0, 3])
def test_the_first_token_of_no_length_waits_for_the_checkpoint(make: Callable[..., Engine], k: int) -> None:
    num_rounds = set()
    for length in range(15, 20):
        engine = make(k=k)
        engine.submit(1, prompt(length, 1), 9)
        for num in range(1, 9):
            engine.step()
            if engine.text.tokens[ReqId(1)]:
                num_rounds.add(num)
                break
        engine.run()
        settle(engine)
    assert len(num_rounds) == 1


@pytest.mark.parametrize("num_others", [0, 2])
@pytest.mark.parametrize("length", range(15, 20))
def test_the_first_block_that_waited_has_its_drafts(make: Callable[..., Engine], length: int, num_others: int) -> None:
    engine = make(k=3)
    for rid in range(2, 2 + num_others):
        engine.submit(rid, prompt(5 + rid, rid), 40)
    for _ in range(4):
        engine.step()
    engine.submit(1, prompt(length, 1), 13)
    engine.run()
    assert engine.text.usages[ReqId(1)].accepted == [0, 0, 0, 3], "a token of the prompt, then blocks of four"
    if isinstance(engine, PipelinedEngine):
        engine.check_accounts()
    settle(engine)


@pytest.mark.parametrize("length", range(15, 20))
@pytest.mark.parametrize("num_out", [1, 2, 13])
def test_no_step_is_waited_for_out_of_turn(length: int, num_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PipelinedEngine(num_frames=200, k=3, recurrent=True, wrong_every=0, max_prefill=40)
    engine.submit(2, prompt(6, 2), 60)
    for _ in range(4):
        engine.step()
    plain = engine.executor.fence

    def fence(wait: Callable[[Callable[[], bool]], None]) -> None:
        assert engine.scheduler._flight is None, "a step is under way, and the host waits for it"
        plain(wait)

    monkeypatch.setattr(engine.executor, "fence", fence)
    for rid in (1, 3):
        engine.submit(rid, prompt(length, 1), num_out)
        while ReqId(rid) not in engine.text.finished:
            engine.step()
    engine.run()
    assert cached(engine, 3) == (length - 1) // 4 * 4
    settle(engine)


@pytest.mark.parametrize("max_prefill", [3, 4, 6, 9, 16])
@pytest.mark.parametrize("k", [0, 3])
def test_prompts_in_chunks_beside_others_leave_their_checkpoints(
    make: Callable[..., Engine], max_prefill: int, k: int
) -> None:
    engine = make(max_prefill=max_prefill, k=k, max_running=6, num_frames=400)
    lengths = dict(enumerate((16, 8, 15, 12, 17, 20), start=1))
    for first in (0, 100):
        for rid, length in lengths.items():
            engine.submit(first + rid, prompt(length, rid), 7)
        engine.run()
    assert {rid: cached(engine, 100 + rid) for rid in lengths} == {
        rid: (length - 1) // 4 * 4 for rid, length in lengths.items()
    }
    settle(engine)


INTERVAL = 16
"""Tokens between checkpoints of a long prompt of the toy target."""


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(
    ("length", "chunks"), [(24, [16, 8]), (27, [16, 11]), (32, [16, 16]), (36, [16, 20]), (40, [16, 16, 8])]
)
def test_checkpoints_at_intervals_are_left_on_the_way(
    make: Callable[..., Engine], length: int, chunks: list[int], k: int
) -> None:
    engine = make(k=k)
    assert engine.manager._store.kinds.checkpoint_pages * 4 == INTERVAL
    found = chunks_of(engine)
    text = prompt(length, 1)
    engine.submit(1, text, 9)
    engine.run()
    assert found == {1: chunks}
    ends = [end for end in (INTERVAL, 2 * INTERVAL) if end < length]
    for rid, end in enumerate(ends, start=2):
        engine.submit(rid, text[:end] + prompt(4, rid), 9)
        engine.run()
    engine.submit(9, text, 9)
    engine.run()
    assert [cached(engine, rid) for rid in (*range(2, 2 + len(ends)), 9)] == [*ends, (length - 1) // 4 * 4]
    settle(engine)


@pytest.mark.parametrize("num_steps", range(2, 8))
@pytest.mark.parametrize("how", ["abort", "demand"])
@pytest.mark.parametrize("k", [0, 3])
def test_what_is_taken_back_at_any_step_can_go_on(num_steps: int, how: str, k: int) -> None:
    engine = PipelinedEngine(num_frames=400, k=k, recurrent=True, wrong_every=0, max_prefill=40)
    engine.submit(1, prompt(16, 1), 30)
    for _ in range(num_steps):
        engine.step()
    if how == "abort":
        engine.abort(1)
    else:
        engine.step_demanding(1)
    engine.submit(2, prompt(16, 1), 9)
    engine.run()
    engine.submit(3, prompt(16, 1), 9)
    engine.run()
    assert cached(engine, 3) == 12
    settle(engine)


def test_a_checkpoint_for_which_there_is_no_room_is_left_out(make: Callable[..., Engine]) -> None:
    num_skipped = 0
    for num_frames in range(11, 18):
        engine = make(num_frames=num_frames, max_running=2)
        for rid in (1, 2, 3, 4):
            engine.submit(rid, prompt(16, 1 + rid // 3), 5)
        engine.run()
        num_skipped += engine.manager.handle_admin(GetStats()).num_freeze_skipped
        settle(engine)
    assert num_skipped > 0
