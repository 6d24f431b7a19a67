"""Loads: the same for every mode, with the lengths and shared prefixes that they promise."""

from pathlib import Path

import pytest

from tests.bench.pool_loads import (
    LONG_FROM,
    LONG_TO,
    MAX_PROMPT,
    TRACE_BLOCK,
    Horizon,
    Trace,
    make_jobs,
    read_azure,
    read_mooncake,
)
from tests.bench.pool_modes import GIB

HORIZON = Horizon(arena_bytes=8 * GIB, seconds=3.0, step_s=0.03)


@pytest.mark.parametrize(
    ("name", "prompts", "answers"),
    [("short", (100, 1000), (50, 300)), ("long", (16384, 32768), (200, 1000)), ("mixed", (100, 32768), (100, 1000))],
)
def test_lengths_are_as_stated(name: str, prompts: tuple[int, int], answers: tuple[int, int]):
    jobs = make_jobs(name, 1, HORIZON)
    assert all(prompts[0] <= job.prompt_len <= prompts[1] for job in jobs)
    assert all(answers[0] <= job.end_len - job.prompt_len <= answers[1] for job in jobs)


@pytest.mark.parametrize("name", ["short", "shifting", "mooncake-like", "azure-like"])
def test_a_seed_names_one_list_of_jobs_in_order_of_arrival(name: str):
    jobs, again, other = (make_jobs(name, seed, HORIZON) for seed in (1, 1, 2))
    assert [(job.arrival_s, job.prompt_len, job.text) for job in jobs] == [
        (job.arrival_s, job.prompt_len, job.text) for job in again
    ]
    assert [job.text for job in jobs] != [job.text for job in other]
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    assert jobs[-1].arrival_s <= HORIZON.seconds


def test_a_backlog_waits_from_the_start_and_a_larger_memory_gets_more():
    small, large = (
        make_jobs("mixed", 1, HORIZON),
        make_jobs("mixed", 1, Horizon(arena_bytes=32 * GIB, seconds=3, step_s=0.03)),
    )
    assert sum(job.arrival_s == 0 for job in small) >= 10
    assert 3 < len(large) / len(small) < 5


def test_the_shifting_load_is_long_in_its_middle_and_nobody_waits_past_a_change():
    bounds = [LONG_FROM * HORIZON.seconds, LONG_TO * HORIZON.seconds]
    for job in make_jobs("shifting", 1, HORIZON):
        is_long = bounds[0] <= job.arrival_s < bounds[1]
        assert is_long == (job.prompt_len >= 16384)
        part_end = next((end for end in bounds if job.arrival_s < end), HORIZON.seconds)
        assert job.gives_up_s == part_end


def test_next_turns_repeat_the_whole_text_before_them():
    jobs = make_jobs("mooncake-like", 1, HORIZON)
    repeats = [job for i, job in enumerate(jobs) for before in jobs[:i] if job.text.startswith(before.text)]
    assert len(repeats) > len(jobs) / 10


def test_equal_ids_of_a_trace_are_equal_blocks_and_long_prompts_are_cut():
    ids = [[1, 2, 3], [1, 2, 4], list(range(100, 300))]
    trace = Trace(times=[0, 1, 2], prompts=[1400, 1300, 200 * TRACE_BLOCK], answers=[5, 6, 7], blocks=ids)
    jobs = make_jobs("mooncake", 0, HORIZON, trace)
    first, second, third = jobs[:3]
    assert [job.prompt_len for job in jobs[:3]] == [1400, 1300, MAX_PROMPT]
    assert [job.end_len - job.prompt_len for job in jobs[:3]] == [5, 6, 7]
    shared = 4 * 2 * TRACE_BLOCK
    assert first.text[:shared] == second.text[:shared]
    assert first.text[shared : shared + 64] != second.text[shared : shared + 64]
    assert third.text[:64] != first.text[:64]
    assert jobs[3].text[: 4 * 1400] == first.text[: 4 * 1400]


def test_trace_files_are_read(tmp_path: Path):
    mooncake, azure = tmp_path / "m.jsonl", tmp_path / "a.csv"
    mooncake.write_text('{"timestamp": 1500, "input_length": 600, "output_length": 9, "hash_ids": [0, 7]}\n')
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.1805900,396,109\n"
    )
    assert read_mooncake(mooncake) == Trace(times=[1.5], prompts=[600], answers=[9], blocks=[[0, 7]])
    trace = read_azure(azure)
    assert trace.times == pytest.approx([0, 0.5])
    assert (trace.prompts, trace.answers) == ([374, 396], [44, 109])
