"""Steps whose blocks differ in width: the text is the same, and the draft misses nothing."""

import random
from collections.abc import Callable

import pytest

from memsvc.wire.base import ReqId
from target_worker.backlog import MOST_STEPS, Backlog
from target_worker.plan import StepPlan
from target_worker.req import FeatureRows
from target_worker.width import AutoWidth, FixedWidth
from tests.support.toy_engine import ToyEngine
from tests.support.toy_texts import prompt, settle
from tests.support.width_rig import Forced, costs

SCHEDULES: dict[str, Callable[[int], int]] = {
    "plain": lambda _step: 0,
    "one step in five drafts": lambda step: 7 * (step % 5 == 4),
    "long plain stretches": lambda step: 0 if step % 40 < 35 else 3,
    "every width in turn": lambda step: step % 8,
    "always all": lambda _step: 7,
}


def load(engine: ToyEngine, num_reqs: int = 20) -> None:
    for rid in range(1, num_reqs + 1):
        engine.submit(rid, prompt(3 + rid % 11, rid % 7), 5 + rid * 7 % 60)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_texts_equal_the_model_whatever_the_widths(schedule: str, recurrent: bool) -> None:
    engine = ToyEngine(num_frames=500, k=7, max_running=8, width=Forced(SCHEDULES[schedule]), recurrent=recurrent)
    load(engine)
    engine.run()
    assert engine.text.failed == {}
    settle(engine)


@pytest.mark.parametrize("num_frames", [16, 22, 34])
@pytest.mark.parametrize("schedule", ["one step in five drafts", "long plain stretches"])
def test_a_pool_for_a_part_of_the_work_gives_the_same_texts(schedule: str, num_frames: int) -> None:
    engine = ToyEngine(num_frames=num_frames, k=3, max_running=8, max_prefill=40, width=_at_most(schedule, 3))
    for rid in range(1, 13):
        engine.submit(rid, prompt(10, rid % 5), 12 + rid)
    engine.run()
    assert engine.text.failed == {}
    settle(engine)


def _at_most(schedule: str, most: int) -> "Forced":
    return Forced(lambda step: min(most, SCHEDULES[schedule](step)))


def test_features_of_plain_steps_go_to_the_draft_together_and_all_of_them() -> None:
    messages = {}
    for most in (MOST_STEPS, 1):
        engine = ToyEngine(num_frames=400, k=3, max_running=2, width=Forced(lambda step: 3 * (step % 50 == 49)))
        assert engine.spec is not None
        if most == 1:
            engine.scheduler._drafting._backlog.is_due = lambda _plan, _running: True  # type: ignore[method-assign]
        engine.submit(1, prompt(5, 1), 120)
        steps = engine.run()
        messages[most] = engine.spec.num_messages
        # The toy draft has compared every token of the context at each block.
        assert engine.spec.num_context_tokens > 100
        settle(engine)
    assert messages[1] >= steps - 5
    assert messages[MOST_STEPS] <= messages[1] / MOST_STEPS + 6


def test_drafts_after_plain_steps_are_those_of_a_draft_that_was_always_fed() -> None:
    drafted = []
    for schedule in (SCHEDULES["always all"], SCHEDULES["long plain stretches"]):
        engine = ToyEngine(num_frames=400, k=7, wrong_every=1000, width=Forced(schedule))
        engine.submit(1, prompt(5, 3), 150)
        engine.run()
        usage = engine.text.usages[ReqId(1)]
        drafted.append(usage.num_drafts)
        assert sum(usage.accepted[:3]) <= 1, "a block was not accepted whole"
    assert drafted[0] > drafted[1] > 0


# A window may be less than a page, or end inside one.
@pytest.mark.parametrize("page_size", [4, 8])
@pytest.mark.parametrize("window", [3, 4, 8, 10, 12, 40])
@pytest.mark.parametrize("schedule", ["plain", "one step in five drafts", "long plain stretches"])
def test_features_are_written_before_the_window_leaves_their_page(schedule: str, window: int, page_size: int) -> None:
    engine = ToyEngine(
        num_frames=60, page_size=page_size, k=7, max_running=4, width=Forced(SCHEDULES[schedule]), window=window
    )
    load(engine, 12)
    engine.run()
    assert engine.text.failed == {}
    settle(engine)


@pytest.mark.parametrize("seed", range(12))
def test_random_widths_with_draft_deaths_and_aborts(seed: int) -> None:
    rng = random.Random(seed)
    engine = ToyEngine(
        num_frames=rng.choice([18, 26, 40, 90]),
        k=7,
        max_running=6,
        wrong_every=rng.choice([2, 5]),
        width=Forced(lambda _step: rng.choice([0, 0, 0, 0, 1, 3, 7])),
        window=rng.choice([0, 4, 16]),
        recurrent=seed % 3 == 0,
    )
    assert engine.spec is not None
    for rid in range(1, 40):
        base = prompt(rng.randrange(1, 12), rng.randrange(3))
        engine.submit(rid, base + prompt(rng.randrange(0, 8), rid), rng.randrange(1, 30))
        for _ in range(rng.randrange(4)):
            engine.scheduler.step()
        if rng.random() < 0.2:
            engine.abort(rng.randrange(1, rid + 1))
        if rng.random() < 0.1:
            engine.spec.die()
        if rng.random() < 0.3:
            engine.spec.come_back()
    engine.run()
    assert engine.text.failed.keys() <= engine.prompts.keys()
    assert not [text for text in engine.text.failed.values() if not text.startswith("too_large")]
    settle(engine)


def test_a_wide_block_that_does_not_pay_gives_way_to_plain_steps() -> None:
    seconds = costs(row=1.0)
    engine = ToyEngine(num_frames=400, k=7, max_running=4, wrong_every=1, width=AutoWidth((0, 1, 3, 7)))
    engine.executor.seconds_of = lambda plan: seconds(max(1, len(plan.decode)), plan.num_drafts)
    for rid in range(1, 40):
        engine.submit(rid, prompt(6, rid), 60)
    engine.run()
    stats = engine.text.stats
    assert stats is not None
    by_width = dict(zip(stats.widths, stats.width_steps, strict=True))
    assert by_width[0] > 0.8 * sum(by_width.values())
    assert sum(stats.width_seconds) == pytest.approx(engine.executor.clock, rel=0.1)
    settle(engine)


def test_the_counters_tell_steps_tokens_and_time_by_width() -> None:
    engine = ToyEngine(num_frames=400, k=7, wrong_every=1000, width=Forced(lambda step: 7 * (step % 2)))
    engine.executor.seconds_of = lambda plan: 1.0 + plan.num_drafts
    engine.submit(1, prompt(5, 3), 150)
    engine.run()
    stats = engine.text.stats
    assert stats is not None
    assert (stats.widths, stats.width) in (([0, 7], 0), ([0, 7], 7))
    assert stats.width_tokens[0] == stats.width_steps[0]
    assert stats.width_tokens[1] > 7 * stats.width_steps[1]
    assert stats.width_seconds == [stats.width_steps[0] * 1.0, stats.width_steps[1] * 8.0]
    assert sum(stats.width_tokens) + 1 == stats.generated_tokens


def test_a_number_of_drafts_never_lets_features_wait() -> None:
    backlog = Backlog(num_rows=64, page_size=4, window=0)
    engine = ToyEngine(num_frames=100, k=3, width=FixedWidth(3))
    load(engine, 3)
    for _ in range(6):
        engine.scheduler.step()
    reqs = list(engine.scheduler._running.values())
    assert backlog.is_due(StepPlan(decode=reqs, num_drafts=3), reqs)
    assert backlog.is_due(StepPlan(), reqs)
    assert not backlog.is_due(StepPlan(decode=reqs), reqs)
    assert all(rows.row + rows.num <= 3 * 4 for req in reqs for rows in req.draft.pending)


def test_features_wait_only_while_there_are_rows_for_them() -> None:
    backlog = Backlog(num_rows=10, page_size=4, window=0)
    engine = ToyEngine(num_frames=100, k=3)
    load(engine, 4)
    for _ in range(6):
        engine.scheduler.step()
    reqs = list(engine.scheduler._running.values())
    plan = StepPlan(decode=reqs)
    assert [backlog.place(plan), backlog.place(plan)] == [0, 4]
    assert backlog.is_due(plan, reqs)
    backlog.clear()
    assert backlog.place(plan) == 0


def test_features_wait_only_as_long_as_their_page_is_in_the_window() -> None:
    backlog = Backlog(num_rows=100, page_size=4, window=8)
    engine = ToyEngine(num_frames=100, k=3)
    load(engine, 1)
    for _ in range(3):
        engine.scheduler.step()
    (req,) = engine.scheduler._running.values()
    plan = StepPlan(decode=[req])
    req.draft.pending = [FeatureRows(5, 1, 0)]
    due = {}
    for length in range(6, 20):
        req.computed_len = length
        due[length] = backlog.is_due(plan, [req])
    # Page 1 leaves when 16 tokens are computed: two pages of window before page 4.
    assert due == {length: length >= 16 for length in due}
