"""The chooser of widths on servers whose best width is known."""

import pytest

from target_worker.acceptance import MEMORY_BLOCKS, Acceptance
from target_worker.config import TargetConfig
from target_worker.step_costs import PromptCost, StepCosts
from target_worker.width import PROBE_SHARE, PROBE_STEPS, AutoWidth, FixedWidth, make_width
from tests.support.width_rig import WIDTHS, WidthRig, best_rate, costs

SERVERS = {
    "a small model, whose rows cost": costs(row=0.03),
    "a large model, whose rows are free up to a point": costs(row=0.02, draft=0.1, free_rows=64),
    "a drafter as dear as the target": costs(row=0.01, draft=1.0),
}


def share_of_best(rig: WidthRig, num_reqs: int) -> float:
    return rig.throughput / best_rate(rig.seconds, rig.rate, num_reqs)[0]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("num_reqs", [1, 8, 32])
@pytest.mark.parametrize("server", SERVERS)
def test_it_comes_near_the_best_width_and_never_falls_below_plain_decoding(
    server: str, num_reqs: int, rate: float
) -> None:
    rig = WidthRig(AutoWidth(WIDTHS), SERVERS[server], rate, noise=0.05)
    rig.run(500, num_reqs)
    rig.restart()
    rig.run(1500, num_reqs)
    assert share_of_best(rig, num_reqs) > 0.96
    assert rig.throughput * rig.seconds(num_reqs, 0) > 1 - 1.5 * PROBE_SHARE


@pytest.mark.parametrize("num_reqs", [1, 32])
def test_where_drafts_are_worth_nothing_the_loss_is_the_share_for_probes_and_a_little_to_begin_with(
    num_reqs: int,
) -> None:
    rig = WidthRig(AutoWidth(WIDTHS), costs(row=0.05), rate=0.0)
    rig.run(150, num_reqs)
    plain = rig.seconds(num_reqs, 0)
    assert rig.time - rig.num_tokens * plain < 32 * plain
    rig.restart()
    rig.run(4000, num_reqs)
    assert rig.throughput * plain > 1 - 1.3 * PROBE_SHARE
    assert 0 < sum(width > 0 for width in rig.chosen) < 400


def test_a_change_of_acceptance_changes_the_width() -> None:
    rig = WidthRig(AutoWidth(WIDTHS), costs(row=0.03), rate=0.9)
    rig.run(600, 8)
    assert rig.chosen[-1] >= 5
    rig.rate = 0.05
    rig.run(400, 8)
    rig.restart()
    rig.run(400, 8)
    assert share_of_best(rig, 8) > 0.97
    rig.rate = 0.9
    # Only probes see it now.
    rig.run(2500, 8)
    rig.restart()
    rig.run(400, 8)
    assert share_of_best(rig, 8) > 0.97


def test_each_batch_size_has_a_width_of_its_own() -> None:
    rig = WidthRig(AutoWidth(WIDTHS), costs(row=0.03), rate=0.75)
    sizes = [1] * 20 + [32] * 20
    rig.run(1200, sizes)
    rig.restart()
    rig.run(400, sizes)
    small, large = ({rig.chosen[i] for i in range(400) if sizes[i % 40] == size} for size in (1, 32))
    assert best_rate(rig.seconds, 0.75, 1)[1] in small
    assert max(set(rig.chosen), key=rig.chosen.count) in (best_rate(rig.seconds, 0.75, n)[1] for n in (1, 32))
    assert best_rate(rig.seconds, 0.75, 32)[1] in large
    assert min(small - {0}) > max(large) or 0 in large


def test_batches_that_change_from_step_to_step_end_no_better_width() -> None:
    rig = WidthRig(AutoWidth(WIDTHS), costs(row=0.03), rate=0.75)
    rig.run(3000, [4, 5, 8, 9, 7, 3, 6])
    rig.restart()
    rig.run(700, [4, 5, 8, 9, 7, 3, 6])
    plain = sum(rig.seconds(n, 0) for n in (4, 5, 8, 9, 7, 3, 6)) / 7
    assert rig.throughput * plain > 1.25


def test_chunks_of_prompts_are_not_held_against_the_width_they_come_with() -> None:
    rig = WidthRig(AutoWidth(WIDTHS), costs(row=0.03), rate=0.75, prompt_row=0.05)
    rig.run(600, 8, [0, 100, 0, 0, 37, 12, 0])
    rig.restart()
    rig.run(600, 8, [0, 100, 0, 0, 37, 12, 0])
    assert share_of_best(rig, 8) > 0.97


def test_a_machine_that_is_slow_for_a_while_changes_nothing() -> None:
    rig = WidthRig(AutoWidth(WIDTHS), costs(row=0.005), rate=0.95, noise=0.05)
    rig.run(800, 8)
    best = rig.chosen[-1]
    for slow in (3.0, 1.0, 2.0, 1.0):
        rig.slow = slow
        rig.restart()
        rig.run(300, 8)
        assert rig.chosen.count(best) > 0.92 * len(rig.chosen)


def test_the_same_measurements_give_the_same_widths() -> None:
    runs = []
    for _ in range(2):
        rig = WidthRig(AutoWidth(WIDTHS), costs(row=0.03), rate=0.6, noise=0.2)
        rig.run(500, [8, 9, 10], [0, 0, 40])
        runs.append(rig.chosen)
    assert runs[0] == runs[1]


def test_changes_are_told_once_with_what_they_promise() -> None:
    width = AutoWidth(WIDTHS)
    rig = WidthRig(width, costs(row=0.001), rate=0.95)
    rig.run(300, 1)
    changes = width.take_changes()
    assert width.take_changes() == []
    assert [change.before for change in changes[1:]] == [change.now for change in changes[:-1]]
    assert (changes[0].num_reqs, changes[-1].now) == (1, 7)
    assert all(change.gain > 1 for change in changes)


def test_a_number_is_kept_whatever_is_measured() -> None:
    config = TargetConfig(run_dir="", model_path="", num_draft_tokens=7, draft=True)
    rig = WidthRig(make_width(config), costs(row=1.0), rate=0.0)
    rig.run(200, 8)
    assert set(rig.chosen) == {7}
    assert isinstance(rig.width, FixedWidth)
    assert rig.width.take_changes() == []


def test_widths_without_plain_decoding_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 3\] must hold 0"):
        AutoWidth([1, 3])


def test_a_step_without_blocks_needs_no_width() -> None:
    assert AutoWidth(WIDTHS).choose(0) == 0


def test_only_the_settings_widths_are_chosen() -> None:
    rig = WidthRig(AutoWidth((0, 4)), costs(row=0.001), rate=0.9)
    rig.run(300, 2)
    assert set(rig.chosen) == {0, 4}
    assert rig.chosen.count(0) < 20 * PROBE_STEPS


def test_acceptance_is_by_place_and_fades() -> None:
    acceptance = Acceptance(3)
    for _ in range(MEMORY_BLOCKS * 6):
        acceptance.add(2, 1)
    # The first is always accepted, the second never; of the third nothing is known, so it is taken to be like it.
    assert acceptance.tokens(1) == pytest.approx(2, abs=0.01)
    assert acceptance.tokens(3) == pytest.approx(2, abs=0.02)
    for _ in range(MEMORY_BLOCKS):
        acceptance.add(2, 0)
    assert acceptance.tokens(1) == pytest.approx(1.37, abs=0.02)


def test_a_place_is_judged_by_the_blocks_that_reach_it() -> None:
    acceptance = Acceptance(3)
    for _ in range(MEMORY_BLOCKS * 3):
        acceptance.add(3, 0)
        acceptance.add(3, 3)
    assert acceptance.tokens(3) == pytest.approx(1 + 3 * 0.5, abs=0.03)


def test_after_long_plain_decoding_a_few_blocks_outweigh_what_was_known() -> None:
    acceptance = Acceptance(2)
    for _ in range(MEMORY_BLOCKS * 3):
        acceptance.add(2, 0)
    for _ in range(400):
        acceptance.fade()
    assert acceptance.tokens(2) < 1.1
    for _ in range(40):
        acceptance.add(2, 2)
    assert acceptance.tokens(2) > 1.7


def test_costs_between_measured_widths_lie_on_the_line_through_them() -> None:
    found = StepCosts(WIDTHS)
    for width, seconds in ((0, 1.0), (2, 2.0)):
        for _ in range(2):
            found.add(width, seconds, in_use=False, is_first=False)
    assert [found.seconds(width) for width in WIDTHS] == [1.0, 1.5, 2.0, 2.5, 3.5, 4.5]
    like = StepCosts(WIDTHS, found)
    like.add(0, 3.0, in_use=True, is_first=False)
    assert [like.seconds(width) for width in WIDTHS] == [3.0, 4.5, 6.0, 7.5, 10.5, 13.5]


def test_a_step_right_after_another_width_counts_only_while_there_is_no_better() -> None:
    found = StepCosts(WIDTHS)
    found.add(3, 9.0, in_use=False, is_first=True)
    assert (found.seconds(3), found.num_averaged(3)) == (9.0, 0)
    found.add(3, 2.0, in_use=False, is_first=False)
    found.add(3, 9.0, in_use=False, is_first=True)
    assert found.seconds(3) == 2.0


def test_of_two_steps_that_differ_too_much_the_faster_one_is_believed() -> None:
    for steps in ((1.0, 9.0), (9.0, 1.0)):
        found = StepCosts(WIDTHS)
        for seconds in steps:
            found.add(3, seconds, in_use=False, is_first=False)
        assert found.seconds(3) == pytest.approx(1.25)


def test_the_cost_of_a_prompt_token_is_the_slope_of_differences() -> None:
    cost = PromptCost()
    assert cost.seconds == 0
    for rows, seconds in ((100, 0.21), (-100, -0.19), (50, 0.1), (0, 5.0)):
        cost.add(rows, seconds)
    assert cost.seconds == pytest.approx(0.002, rel=0.02)
