"""A training in one piece and in slices: it learns, it goes on where it was, it ends in time."""

import json
import logging
import shlex

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draft_worker.config import DraftConfig
from draft_worker.shape import DraftShape
from draft_worker.train import checkpoint, fit, run
from draft_worker.train.config import TrainConfig
from draft_worker.train.held_out import Acceptance, count_steps
from draft_worker.train.plot import plot, read_log
from draft_worker.train.sequences import write_sequences
from draft_worker.train.trainer import LOG_FILE
from draft_worker.weights import load_model
from target_worker.train import schedule, sliced_run, state
from target_worker.train.schedule import Pace, learning_rate
from target_worker.train.state import Progress, has_state
from tests.support.train_rig import make_run, make_trainer, paths_of, small_drafter, small_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("fit")
    make_run(made)
    return made


def log_of(paths, kind):
    return read_log(paths.state / LOG_FILE)[kind]


def test_loss_falls_and_the_drafter_loads_where_drafts_are_served(folder):
    paths = paths_of(folder, "falls")
    make_trainer(paths, steps=60, lr=5e-3).run()
    losses = [entry["loss"] for entry in log_of(paths, "step")]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
    assert log_of(paths, "held_out")[-1]["accept_length_greedy"] >= 1.0
    config = DraftConfig(run_dir="", draft_path=str(paths.out), target_path=str(paths.target), dtype="float32")
    assert load_model(config, DraftShape.from_folder(paths.out)).selector is not None
    plot(paths.state / LOG_FILE, folder / "train.png")
    assert (folder / "train.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_in_slices_ends_where_one_in_a_piece_does(folder):
    whole, sliced = paths_of(folder, "whole"), paths_of(folder, "sliced")
    make_trainer(whole).run()
    first = make_trainer(sliced)
    # The time of the first slice is over after three steps.
    first._late = lambda _started: first.progress.step >= 3
    first.run()
    assert not first.is_done
    second = make_trainer(sliced)
    assert second.progress.step == 3
    second.run()
    assert second.is_done
    one, other = (load_file(next(paths.state.glob("*.safetensors"))) for paths in (whole, sliced))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [entry["step"] for entry in log_of(sliced, "step")] == [2, 4, 6, 8]


def test_each_pass_over_the_answers_is_planned_once(folder):
    made = make_trainer(paths_of(folder, "passes"), tokens_per_step=64)
    plan, planned = made._schedule.epoch, []
    made._schedule = type("Counted", (), {"epoch": lambda _self, number: planned.append(number) or plan(number)})()
    for step in range(3 * len(made._batches(0))):
        made.progress.step = step
        made._next_batch()
    assert planned in ([0, 1, 2], [0, 1, 2, 3])


def test_a_slice_ends_when_its_time_is_over(folder, monkeypatch):
    paths = paths_of(folder, "late")
    made = make_trainer(paths, max_seconds=1000.0)
    clock = iter(np.arange(0.0, 1e6, 300.0))
    monkeypatch.setattr(sliced_run.time, "monotonic", lambda: float(next(clock)))
    made.run()
    assert 0 < made.progress.step < 8
    assert has_state(paths.state)


def pace_of(monkeypatch, num, per_s):
    """That of a slice of num steps, so many a second."""
    with monkeypatch.context() as patch:
        clock = iter(range(num))
        patch.setattr(schedule.time, "monotonic", lambda: next(clock) / per_s)
        pace = Pace(torch.device("cpu"))
        for _ in range(num):
            pace.mark()
    return pace


def test_the_pace_is_that_of_the_last_steps(monkeypatch):
    assert pace_of(monkeypatch, 30, 2).steps_per_s(20) == pytest.approx(2.0)
    assert pace_of(monkeypatch, 1, 2).steps_per_s(20) == 0.0


def test_steps_that_fit_are_fixed_once_the_speed_is_known(folder, monkeypatch):
    made = make_trainer(paths_of(folder, "fits"), steps=0, fit_seconds=100.0)
    made._fix_steps(pace_of(monkeypatch, 40, 10))
    assert made.progress.total_steps == 0
    made._fix_steps(pace_of(monkeypatch, 61, 10))
    assert made.progress.total_steps == 940
    made._fix_steps(pace_of(monkeypatch, 61, 1))
    assert made.progress.total_steps == 940


def test_the_number_of_steps_is_remembered_and_can_be_changed(folder):
    paths = paths_of(folder, "remembers")
    make_trainer(paths, steps=2).run()
    assert make_trainer(paths, steps=0).progress.total_steps == 2
    assert make_trainer(paths, steps=5).progress.total_steps == 5


def test_a_state_of_another_drafter_is_refused(folder):
    paths = paths_of(folder, "other")
    make_trainer(paths, steps=1).run()
    with pytest.raises(ValueError, match="holds a run of"):
        make_trainer(paths, small_drafter(rank=5))


def test_a_drafter_can_start_from_another_one_and_from_one_without_selector(folder):
    old = paths_of(folder, "v1")
    make_trainer(old, small_drafter(version=1), steps=2).run()
    new = paths_of(folder, "v2")
    made = make_trainer(type(new)(target=new.target, answers=new.answers, state=new.state, out=new.out, init=old.out))
    stored = load_file(old.out / "model.safetensors")
    model = made.model()
    assert torch.equal(model.feature_proj.weight, stored["fc.weight"].float())
    assert model.selector is not None
    assert not model.selector.successor.any()


def test_a_crash_while_saving_leaves_the_state_before(folder, monkeypatch):
    paths = paths_of(folder, "crash")
    made = make_trainer(paths, steps=2)
    made.run()

    def crash(*_args):
        raise OSError("no power")

    monkeypatch.setattr(state.os, "replace", crash)
    made.progress.step = 5
    with pytest.raises(OSError, match="no power"):
        made.save()
    assert make_trainer(paths, steps=2).progress.step == 2


def test_weights_are_cut_into_files_of_limited_size_with_an_index(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 20_000)
    paths = paths_of(folder, "shards")
    make_trainer(paths, steps=1).run()
    files = sorted(paths.out.glob("model-*.safetensors"))
    assert len(files) > 2
    index = json.loads((paths.out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    config = DraftConfig(run_dir="", draft_path=str(paths.out), target_path=str(paths.target), dtype="float32")
    model = load_model(config, DraftShape.from_folder(paths.out))
    assert model.draft_to_target is not None
    assert len(model.draft_to_target) == 48


def test_the_learning_rate_rises_to_its_peak_and_falls_by_a_cosine():
    config = TrainConfig(lr=1.0, warmup_steps=10)

    def at(step, total=110):
        return learning_rate(config, Progress(step=step, total_steps=total))

    assert at(0) == pytest.approx(0.1)
    assert at(9) == at(10) == 1.0
    assert at(60) == pytest.approx(0.01 + 0.99 / 2)
    assert at(110) == pytest.approx(0.01)
    assert at(50, total=0) == 1.0


def test_steps_are_counted_as_serving_takes_them():
    batch = type("Batch", (), {"is_anchor": np.array([[True] * 9])})
    labels = np.array([[[place + 1, place + 2] for place in range(9)]])
    drafts = labels.copy()
    drafts[0, 0, 1] = drafts[0, 2, 0] = -5
    acceptance = Acceptance(2)
    # Anchors 0 (1 accepted), 2 (none), 3 (both), 6 (both); 9 has no block left.
    count_steps(acceptance, batch, drafts, labels)
    assert acceptance.steps == 4
    assert acceptance.accepted.tolist() == [3, 2]
    assert acceptance.facts("x")["accept_length_x"] == 2.25


FLAGS = shlex.split(
    "--slots 4 --max-new 12 --refill-every 3 --loop-share 1 --layers 1 --num-taps 1 --block-rows 3 --window 6"
    " --draft-vocab 32 --rank 2 --top-k 4 --mask-token-id 5 --conv-group 8 --steps 4 --tokens-per-step 200"
    " --anchor-stride 3 --warmup-steps 1 --held-out 2 --log-every 1 --device cpu"
)


@pytest.fixture
def command(folder, tmp_path, monkeypatch):
    """The driver's flags but --home."""
    monkeypatch.setattr(run, "begin", lambda _device: None)
    write_sequences(tmp_path / "prompts", "prompts", small_prompts(8), 1 << 20)
    places = {"--target": folder / "target", "--prompts": tmp_path / "prompts", "--work": tmp_path / "w"}
    return [*FLAGS, *(str(part) for pair in places.items() for part in pair)]


def test_slices_of_the_driver_bring_home_what_is_worth_keeping(command, tmp_path):
    run.main([*command, "--home", str(tmp_path / "h1"), "--slice-seconds", "0", "--keep-answers"])
    assert {file.name for file in (tmp_path / "h1").iterdir()} == {"answers.json", "answers-000.safetensors.xz"}
    run.main([*command, "--home", str(tmp_path / "h2")])
    names = {file.name for file in (tmp_path / "h2").iterdir()}
    assert names == {"answers.json", "config.json", "model.safetensors", "train.jsonl", "train.png"}
    before = (tmp_path / "h2" / "model.safetensors").read_bytes()
    run.main([*command, "--home", str(tmp_path / "h3")])
    assert (tmp_path / "h3" / "model.safetensors").read_bytes() == before


def test_the_last_line_of_a_slice_says_whether_the_command_goes_on(command, tmp_path, caplog):
    caplog.set_level(logging.INFO)

    def last_line(*flags):
        run.main([*command, "--home", str(tmp_path / "home"), *flags])
        return caplog.records[-1].message

    at_once = ["--slice-seconds", "0"]
    assert last_line(*at_once) == "answers are made, all steps are left: the same command goes on"
    assert last_line() == "all steps are made: steps=4"
    assert last_line() == "all steps are made: steps=4"
    assert last_line(*at_once) == "all steps are made: steps=4"
    # The state is of 4 steps, of more that are wanted now.
    assert last_line(*at_once, "--steps", "30") == "steps left=26 of 30: the same command goes on"
    progress = Progress(step=3)
    assert run.what_is_left(progress) == "steps made=3, of how many is not known yet: the same command goes on"


@pytest.mark.parametrize(("flag", "reason"), [("--prompts", "does not exist"), ("--target", "holds no config.json")])
def test_a_path_that_is_not_there_ends_the_driver_with_one_line(command, tmp_path, capsys, flag, reason):
    with pytest.raises(SystemExit, match="1"):
        run.main([*command, "--home", str(tmp_path / "home"), flag, "/nowhere"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert f"/nowhere {reason}" in line


def test_a_run_too_short_for_a_line_of_the_log_brings_the_drafter_home(command, tmp_path):
    run.main([*command, "--home", str(tmp_path / "home"), "--log-every", "100"])
    assert {file.name for file in (tmp_path / "home").iterdir()} == {
        "answers.json", "config.json", "model.safetensors", "train.jsonl"
    }  # fmt: skip


def test_a_wrong_flag_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        fit.main(["--target", "x", "--answers", "x", "--state", "x", "--out", "x", "--block-rows", "1"])
    assert "--block-rows is 1" in capsys.readouterr().err
