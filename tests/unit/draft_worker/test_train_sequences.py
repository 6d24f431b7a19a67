"""Files of sequences give back what was put in, in pieces of a size."""

import numpy as np
import pytest

from draft_worker.train.repetition import in_loop, repeated_share
from draft_worker.train.sequences import from_lists, joined, read_sequences, write_sequences


def some(num, seed=0, vocab=1000):
    rng = np.random.default_rng(seed)
    return from_lists([rng.integers(0, vocab, 1 + n % 9).tolist() for n in range(num)], vocab, list(range(num)))


def same(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in type(one).__slots__)


def test_sequences_come_back_from_files_as_they_were(tmp_path):
    made = some(50)
    assert len(write_sequences(tmp_path, "x", made, 1 << 20)) == 1
    found = read_sequences(tmp_path)
    assert same(found, made)
    assert found.tokens.dtype == np.uint16


def test_files_stay_below_the_size_asked_for_and_lose_nothing(tmp_path):
    made = some(3000)
    files = write_sequences(tmp_path, "x", made, 5000)
    assert len(files) > 3
    assert max(file.stat().st_size for file in files) <= 5000
    assert same(read_sequences(tmp_path), made)


def test_writing_again_removes_files_of_before(tmp_path):
    write_sequences(tmp_path, "x", some(3000), 5000)
    write_sequences(tmp_path, "x", some(4), 5000)
    assert len(read_sequences(tmp_path)) == 4


def test_large_vocabularies_take_wider_tokens(tmp_path):
    made = from_lists([[70000, 3]], 100000, [0])
    write_sequences(tmp_path, "x", made, 1 << 20)
    assert read_sequences(tmp_path)[0].tolist() == [70000, 3]


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="1000"):
        from_lists([[1, 1000]], 1000, [0])


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no"):
        read_sequences(tmp_path)


def test_select_and_join_keep_every_column():
    made = some(20)
    order = np.random.default_rng(1).permutation(20)
    parts = made.select(order[:7]), made.select(order[7:])
    whole = joined(parts)
    for place, index in enumerate(order):
        assert whole[place].tolist() == made[index].tolist()
    assert whole.groups.tolist() == order.tolist()


def test_share_of_repeated_runs():
    fresh = np.arange(100)
    assert repeated_share(fresh, 4) == 0.0
    assert repeated_share(np.tile(np.arange(5), 20), 4) == pytest.approx(1 - 5 / 97)
    assert repeated_share(np.concatenate([fresh[:50], fresh[:50]]), 4) == pytest.approx(47 / 97)
    assert repeated_share(np.arange(3), 4) == 0.0
    assert repeated_share(np.array([1, 2, 3, 4, 3, 2, 1]), 3) == 0.0


def test_loops_are_seen_at_the_end_of_each_row_only():
    import torch

    loop = torch.arange(40) % 5
    rows = torch.stack([loop, torch.arange(40), torch.cat([loop[:20], torch.arange(20)]), loop])
    lens = torch.tensor([40, 40, 40, 15])
    assert in_loop(rows, lens, span=12, max_period=6).tolist() == [True, False, False, False]
    assert in_loop(rows, lens, span=12, max_period=4).tolist() == [False] * 4
    assert not in_loop(rows[:, :10], lens.clamp(max=10), span=12, max_period=6).any()
