"""Which drafter serves a model when the command names none."""

import logging
from pathlib import Path

import pytest

from launch import drafter
from launch.config import LaunchConfig
from launch.drafter import DEFAULT_MODEL_DRAFT, with_drafter
from launch.flags import parse_flags
from launch.models import check_folders, read_models
from memsvc.device.quant_config import int8_config
from tests.support.model_folders import DRAFT, TARGET, folder

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder(tmp_path / "model", TARGET)


@pytest.fixture
def beside(model: Path) -> Path:
    """A drafter that lies with the model."""
    return folder(model / "draft", DRAFT)


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def chosen(model: Path, *flags: str) -> str:
    return with_drafter(parse_flags(["--model-path", str(model), *flags]), model).draft_model_path


def test_the_subfolder_draft_is_the_drafter(model: Path, beside: Path, caplog: pytest.LogCaptureFixture):
    assert chosen(model) == str(beside)
    assert [record.message for record in caplog.records] == [
        f"drafter={beside}, found with the model; --speculative-algorithm none serves without it"
    ]


def test_one_that_is_named_wins_without_a_word(
    model: Path, beside: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    other = str(folder(tmp_path / "other", DRAFT))
    assert chosen(model, "--spec-model", other) == other
    assert not caplog.records


def test_none_turns_it_off_without_a_word(model: Path, beside: Path, caplog: pytest.LogCaptureFixture):
    assert chosen(model, "--speculative-algorithm", "none") == ""
    assert chosen(model, "--spec-method", "NONE") == ""
    assert not caplog.records


def test_a_model_without_one_is_served_without_and_one_line_says_so(model: Path, caplog: pytest.LogCaptureFixture):
    (model / "draft").mkdir()
    assert chosen(model) == ""
    assert [record.message for record in caplog.records] == [
        f"no drafter in {model / 'draft'}: serving without speculation"
    ]


@pytest.mark.parametrize(
    "flags", [["--speculative-algorithm=dflash"], ["--spec-tokens=3"], ["--simulate-accept-length=2"]]
)
def test_what_asks_for_speculation_needs_one(model: Path, flags: list[str]):
    with pytest.raises(ValueError, match=rf"{model}/draft holds none: --speculative-draft-model-path"):
        chosen(model, *flags)
    folder(model / "draft", DRAFT)
    assert chosen(model, *flags)


def test_a_folder_that_does_not_exist_is_named_in_full(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^drafter folder {tmp_path}/nonexist does not exist$"):
        check_folders(LaunchConfig(draft_model_path="nonexist"), model)
    with pytest.raises(ValueError, match=r"^model folder /org/name .*; names of a model hub are not downloaded$"):
        check_folders(LaunchConfig(), Path("/org/name"))
    check_folders(LaunchConfig(), model)


def test_flags_for_the_block_hold_for_the_drafter_that_was_found(model: Path, beside: Path):
    config = with_drafter(LaunchConfig(model_path=str(model), num_drafts=3), model)
    assert read_models(config, model).num_drafts == 3


def test_the_default_model_has_its_drafter_in_the_checkout(
    model: Path, beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert DEFAULT_MODEL_DRAFT == REPOSITORY / "models" / "smollm2-135m-instruct" / "draft"
    monkeypatch.setattr(drafter, "DEFAULT_MODEL_DRAFT", tmp_path / "committed")
    # Its folder is in the cache, in which nobody puts drafters.
    assert with_drafter(LaunchConfig(), model).draft_model_path == ""
    folder(tmp_path / "committed", DRAFT)
    assert with_drafter(LaunchConfig(), model).draft_model_path == str(tmp_path / "committed")


def test_weights_in_int8_are_planned_as_large_as_they_get(model: Path):
    (model / "model.safetensors").write_bytes(bytes(1000))
    assert read_models(LaunchConfig(), model).weight_bytes == 1000
    folder(model, TARGET, quantization_config=int8_config(["Linear"], []))
    assert read_models(LaunchConfig(), model).weight_bytes == 2000
    assert read_models(LaunchConfig(dtype="float32"), model).weight_bytes == 4000
