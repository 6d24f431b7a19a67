"""What the bench of drafter sizes makes of times and estimates, and that it measures the worker that serves."""

import json
from pathlib import Path

import pytest

from draft_worker.train.config import DrafterConfig
from target_worker.model.config import TargetShape
from tests.bench import drafter_sizes, drafter_turns
from tests.bench.drafter_sizes import VARIANTS, Variant
from tests.support.model_folders import TARGET, folder
from tests.support.tiny_target import make_target

VERIFY_MS = 30.0


def write_runs(runs: Path, steps: dict[str, list[int]]) -> None:
    """Logs whose estimates grow by a tenth a hundred steps, from 2 (greedy) and 1.5 (sampled)."""
    for name, estimated in steps.items():
        lines = [{"kind": "step", "step": 20, "loss": 3.0}]
        lines += [
            {"kind": "held_out", "step": step, "tokens": 1, "steps_greedy": 9, "steps_sampled": 9}
            | {"accept_length_greedy": 2 + step / 1000, "accept_length_sampled": 1.5 + step / 1000}
            for step in estimated
        ]
        (runs / name).mkdir(parents=True)
        (runs / name / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def times(*names: str) -> dict:
    rows = [{"variant": name, "threads": 2, "draft_ms": 10.0, "draft_vocab": 16384, "parameters": 5} for name in names]
    return {"config": {"verify_ms": {"2": VERIFY_MS}}, "rows": rows}


def test_the_variants_are_the_base_and_one_factor_at_a_time(tmp_path: Path):
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names) == 13
    assert all(len(variant.changed()) == (variant != Variant()) for variant in VARIANTS)
    assert Variant(draft_vocab=0).name == "draft-vocab-0"
    assert Variant(num_taps=6).flags == "--layers 4 --num-taps 6 --rank 32 --draft-vocab 16384"
    # The figure of the card of SmolLM2's drafter.
    shape = drafter_turns.shape_of(Variant().config, TargetShape.from_folder(folder(tmp_path, TARGET)))
    assert drafter_turns.num_parameters(shape) == 19_335_296


def test_variants_are_compared_at_the_last_step_that_all_have(tmp_path: Path):
    write_runs(tmp_path, {"base": [200, 400, 600], "layers-1": [200, 400, 517]})
    made = drafter_sizes.report(times("base", "layers-1"), tmp_path, 2)
    assert made["config"]["step"] == 400
    assert [row["layers"] for row in made["rows"]] == [4, 1]
    for row in made["rows"]:
        assert set(row) == {*drafter_sizes.COLUMNS, "variant", "estimates_at"}
        assert row["accept_length_greedy"] == 2.4
        assert row["tokens_per_s_greedy"] == 2.4 / 0.04
        assert row["tokens_per_s_sampled"] == 1.9 / 0.04


def test_between_two_estimates_lengths_grow_with_the_logarithm_of_the_step(tmp_path: Path):
    write_runs(tmp_path, {"base": [100, 400], "layers-1": [100, 200]})
    made = drafter_sizes.report(times("base", "layers-1"), tmp_path, 2, step=200)
    between, exact = made["rows"]
    assert (between["accept_length_greedy"], between["accept_length_sampled"]) == (2.25, 1.75)
    assert (exact["accept_length_greedy"], exact["accept_length_sampled"]) == (2.2, 1.7)
    assert (between["estimates_at"], exact["estimates_at"]) == ([100, 400], [200])


@pytest.mark.parametrize("step", [99, 201])
def test_nothing_is_extrapolated(step: int, tmp_path: Path):
    write_runs(tmp_path, {"base": [50, 400], "layers-1": [100, 200]})
    with pytest.raises(ValueError, match=rf"layers-1: step {step} is not between .* at \[100, 200\]"):
        drafter_sizes.report(times("base", "layers-1"), tmp_path, 2, step)


def test_what_was_not_trained_or_not_measured_is_left_out_and_named(tmp_path: Path, capsys):
    write_runs(tmp_path, {"base": [200], "rank-16": [200]})
    made = drafter_sizes.report(times("base", "rank-64"), tmp_path, 2)
    assert [row["rank"] for row in made["rows"]] == [32]
    said = capsys.readouterr().err
    assert "rank-16: no times" in said
    assert "rank-64: not trained" in said


def test_logs_without_a_common_step_and_threads_without_times_are_refused(tmp_path: Path):
    write_runs(tmp_path, {"base": [200], "rank-16": [300]})
    with pytest.raises(ValueError, match="no step of an estimate is in all"):
        drafter_sizes.report(times("base"), tmp_path, 2)
    with pytest.raises(ValueError, match="no variant has a"):
        drafter_sizes.report(times("base"), tmp_path / "elsewhere", 2)
    with pytest.raises(ValueError, match="3 threads were not measured, only 2"):
        drafter_sizes.report(times("base"), tmp_path, 3)


def test_the_table_is_written_and_printed(tmp_path: Path, capsys):
    write_runs(tmp_path / "runs", {"base": [200, 300], "rank-16": [200]})
    speed = times("base", "rank-16")
    speed["rows"][1]["draft_ms"] = 9.0
    (tmp_path / "speed.json").write_text(json.dumps(speed))
    out = tmp_path / "sizes.json"
    drafter_sizes.main(
        ["table", "--speed", f"{tmp_path / 'speed.json'}", "--runs", f"{tmp_path / 'runs'}", "--out", f"{out}"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| 4 | 4 | 32 | 16,384 | 5 | 10.00 | 2.20 | 1.70 | 55.0 | 42.5 |"
    assert lines[3].endswith("| 9.00 | 2.20 | 1.70 | **56.4** | **43.6** |")
    assert lines[5].startswith("| variant | draft ms, 2 threads | greedy at 200 |")
    assert lines[7:] == [
        "| base | 10.00 | 2.200 | 1.700 | 300 | 2.300 | 1.800 |",
        "| rank-16 | 9.00 | 2.200 | 1.700 | 200 | 2.200 | 1.700 |",
    ]
    assert len(json.loads(out.read_text())["rows"]) == 2


def test_draft_steps_and_verifies_of_a_tiny_target_are_timed(tmp_path: Path):
    make_target(tmp_path, "Llama", vocab_size=256)
    configs = {
        f"vocab-{vocab}": DrafterConfig(layers=1, num_taps=2, rank=4, draft_vocab=vocab, mlp_width=16)
        for vocab in (32, 0)
    }
    rows = drafter_turns.measure(tmp_path, configs, (1,), rounds=2)
    assert [(row["variant"], row["threads"]) for row in rows] == [("vocab-32", 1), ("vocab-0", 1)]
    for row in rows:
        parts = {part: row[f"{part}_ms"] for part in drafter_turns.PARTS}
        assert min(parts.values()) > 0
        assert parts["draft"] > max(parts["fwd"], parts["head"], parts["select"])
