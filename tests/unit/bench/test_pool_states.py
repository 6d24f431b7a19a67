"""The state pool of the split modes."""

from tests.bench.pool_states import StateSlots
from tests.support.pool_jobs import text_of


def test_a_request_takes_its_bytes_and_checkpoints_have_the_rest():
    slots = StateSlots(pool_bytes=100, run_bytes=30, state_bytes=10)
    assert slots.num_admissible == 3
    slots.admit()
    assert all(slots.store(text_of(16 + i), 16) for i in range(7))
    assert (slots.num_checkpoints, slots.free_bytes) == (7, 0)


def test_the_least_recently_used_checkpoint_goes_first_and_a_hit_counts_as_use():
    slots = StateSlots(pool_bytes=30, run_bytes=30, state_bytes=10)
    first, second, third, fourth = (text_of(seed) for seed in range(4))
    for text in (first, second, third):
        slots.store(text, 16)
    assert slots.find(first, 16) == 16
    slots.store(fourth, 16)
    assert [slots.find(text, 16) for text in (first, second, third, fourth)] == [16, 0, 16, 16]


def test_running_requests_evict_checkpoints_but_never_each_other():
    slots = StateSlots(pool_bytes=65, run_bytes=30, state_bytes=10)
    for seed in range(6):
        slots.store(text_of(seed), 16)
    slots.admit()
    assert slots.num_checkpoints == 3
    slots.admit()
    assert (slots.num_checkpoints, slots.num_admissible) == (0, 0)
    assert not slots.store(text_of(9), 16)
    slots.release()
    assert slots.num_admissible == 1


def test_the_longest_checkpoint_of_the_same_text_within_the_limit_is_found():
    slots = StateSlots(pool_bytes=100, run_bytes=30, state_bytes=10)
    text, other = text_of(1, 64), text_of(2, 64)
    for length in (16, 32, 48):
        slots.store(text, length)
    slots.store(other, 40)
    assert slots.find(text, 64) == 48
    assert slots.find(text, 47) == 32
    assert slots.find(text[: 4 * 16] + other, 64) == 16
    assert slots.find(other, 39) == 0


def test_a_state_that_is_there_is_not_stored_twice():
    slots = StateSlots(pool_bytes=100, run_bytes=30, state_bytes=10)
    assert slots.store(text_of(1), 16)
    assert slots.store(text_of(1), 16)
    assert slots.num_checkpoints == 1
