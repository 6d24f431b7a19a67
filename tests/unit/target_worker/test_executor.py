"""What a step on the device leaves behind: where features lie, and which of them are final."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memsvc.wire.base import ReqId
from memsvc.wire.text import Sampling
from target_worker.executor import Executor
from target_worker.plan import StepPlan
from target_worker.req import FeatureRows, Phase, Req
from target_worker.trace import StepTrace
from tests.support.tiny_target import TargetRig, make_target, tokens_of

PROMPT = 9


@pytest.fixture
def rig(tmp_path: Path) -> TargetRig:
    make_target(tmp_path, "Llama")
    return TargetRig(tmp_path, taps=(0, 2))


GREEDY = Sampling(seed=1, max_tokens=40, temperature=0.0, ignore_eos=True)
SAMPLED = Sampling(seed=5, max_tokens=40, temperature=0.9, top_p=0.95, frequency_penalty=0.4, ignore_eos=True)


def decoding(rig: TargetRig, rid: int, sampling: Sampling = GREEDY) -> Req:
    """A request whose prompt is computed, features and all, and whose anchor is known."""
    req = Req(ReqId(rid), tokens_of(rid, PROMPT), PROMPT, sampling, 0, "", rid, Phase.PREFILL)
    req.row = rig.open(rid, PROMPT + 48)
    run(rig, StepPlan(chunks={req: PROMPT}))
    req.draft.pending.clear()
    return req


def run(rig: TargetRig, plan: StepPlan, drafts: dict[ReqId, list[int]] | None = None) -> None:
    for req, tokens in Executor(rig.runner).run(plan, drafts or {}, [], StepTrace(0)).items():
        req.tokens.extend(tokens)
        req.phase = Phase.DECODE


def test_features_of_plain_steps_lie_one_after_another_and_are_those_of_one_forward(rig: TargetRig) -> None:
    one, two = decoding(rig, 1), decoding(rig, 2)
    for step in range(3):
        run(rig, StepPlan(decode=[one, two], feature_row=2 * step))
    for place, req in enumerate((one, two)):
        assert req.draft.pending == [FeatureRows(PROMPT + step, 1, 2 * step + place) for step in range(3)]
    kept = rig.features[:6].clone()
    for rid, req in ((11, one), (12, two)):
        row = rig.open(rid, PROMPT + 5)
        rig.logits(row, req.tokens[: PROMPT + 3])
        rows = [rows.row for rows in req.draft.pending]
        torch.testing.assert_close(kept[rows], rig.features[PROMPT : PROMPT + 3], atol=1e-5, rtol=1e-4)


def test_of_a_block_the_rows_of_what_it_emits_are_final(rig: TargetRig) -> None:
    req = decoding(rig, 1)
    before = req.computed_len
    run(rig, StepPlan(decode=[req], num_drafts=2, feature_row=7), {req.rid: [3, 3]})
    (rows,) = req.draft.pending
    assert rows == FeatureRows(before, req.computed_len - before, 7)
    assert req.computed_len == len(req.tokens) - 1


def test_features_past_the_rows_there_are_are_refused(rig: TargetRig) -> None:
    req = decoding(rig, 1)
    with pytest.raises(ValueError, match="a forward of 1 rows, features have room for 0"):
        run(rig, StepPlan(decode=[req], feature_row=256))


def answer(
    rig: TargetRig, sampling: Sampling, schedule: Callable[[int], int], guess: list[int]
) -> tuple[list[int], int]:
    """The whole answer with so many drafts in each step, every fifth of them wrong, and the steps it took."""
    req = decoding(rig, 1, sampling)
    num_steps = 0
    while req.num_left:
        at = len(req.tokens)
        drafts = [
            (token + (place % 5 == 4)) % 97 for place, token in enumerate(guess[at : at + schedule(num_steps)], at)
        ]
        run(rig, StepPlan(decode=[req], num_drafts=len(drafts)), {req.rid: drafts[: req.num_left - 1]})
        num_steps += 1
        assert req.computed_len == len(req.tokens) - 1
    rig.close(1)
    return req.tokens, num_steps


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_same_whatever_the_widths(rig: TargetRig, sampling: Sampling) -> None:
    plain, num_plain = answer(rig, sampling, lambda _step: 0, [])
    for schedule in (
        lambda _step: 7,
        lambda step: step % 4,
        lambda step: 5 * (step % 6 == 5),
        lambda step: 7 - step % 8,
    ):
        text, num_steps = answer(rig, sampling, schedule, plain)
        assert text == plain
        assert num_steps < num_plain
    assert len(set(plain)) > 10
