"""How answers are grouped into steps, where anchors are drawn, and which prompts are held out."""

import numpy as np
import pytest

from draft_worker.train.batches import Schedule, make_batch, split_held_out, usable
from draft_worker.train.sequences import Sequences


def answers(num=60, seed=0):
    rng = np.random.default_rng(seed)
    prompt_lens = rng.integers(1, 10, num)
    lens = prompt_lens + rng.integers(1, 60, num)
    return Sequences(
        tokens=rng.integers(1, 90, lens.sum()).astype(np.uint16),
        ends=np.cumsum(lens),
        prompt_lens=prompt_lens.astype(np.int32),
        temperatures=np.zeros(num, dtype=np.float32),
        groups=(np.arange(num) // 2).astype(np.int32),
    )


def test_a_pass_takes_every_sequence_once_within_the_tokens_of_a_step():
    made = answers()
    batches = Schedule(made, usable(made), 512, 3).epoch(0)
    assert sorted(np.concatenate(batches).tolist()) == usable(made).tolist()
    for batch in batches:
        assert len(batch) * -(-made.lens[batch].max() // 32) * 32 <= 512


def test_order_is_fixed_by_seed_and_pass():
    made = answers()

    def order(seed, epoch):
        return [batch.tolist() for batch in Schedule(made, usable(made), 512, seed).epoch(epoch)]

    assert order(3, 1) == order(3, 1)
    assert order(3, 1) != order(3, 2)
    assert order(3, 1) != order(4, 1)


@pytest.mark.parametrize("stride", [1, 4])
def test_anchors_lie_in_the_answer_before_its_last_token_and_are_distinct(stride):
    made = answers()
    indices = usable(made)[:9]
    batch = make_batch(made, indices, stride, np.random.default_rng(0))
    for row, index in enumerate(indices):
        anchors = batch.anchors[row][batch.is_anchor[row]]
        assert len(anchors) > 0
        assert len(set(anchors.tolist())) == len(anchors)
        assert anchors.min() >= made.prompt_lens[index]
        assert anchors.max() <= made.lens[index] - 2
        assert batch.tokens[row, : made.lens[index]].tolist() == made[index].tolist()
        if stride == 1:
            assert anchors.tolist() == list(range(made.prompt_lens[index], made.lens[index] - 1))


def test_all_answers_to_a_prompt_are_on_one_side():
    made = answers()
    kept, out = split_held_out(made, 7, 0)
    assert set(made.groups[out]).isdisjoint(made.groups[kept])
    assert sorted([*kept, *out]) == usable(made).tolist()
    assert len(set(made.groups[out])) <= 7
    assert len(out) > 0
