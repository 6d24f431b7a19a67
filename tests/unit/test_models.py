"""The models that come with the repository: each has a card with a licence, and is one that is served."""

import json
import re
from pathlib import Path

import pytest

from draft_worker.shape import DraftShape
from memsvc.device.checkpoint import weight_files
from memsvc.device.quant_config import int8_config, is_int8
from target_worker.model.config import TargetShape
from tests.support.model_folders import DRAFT, TARGET, folder

MODELS = Path(__file__).parents[2] / "models"
MAX_BYTES = 32 << 20
CARD = "---\nlicense: apache-2.0\n---\n\nA model.\n"

_LICENSE = re.compile(r"^license: \S+$", re.MULTILINE)


def faults(models: Path) -> list[str]:
    """What is wrong with the folders of models below that one; nothing if it is not there."""
    if not models.is_dir():
        return []
    found = [] if (models / "README.md").is_file() else ["README.md is missing"]
    index = "" if found else (models / "README.md").read_text("utf-8")
    size = sum(path.stat().st_size for path in models.rglob("*") if path.is_file())
    found += [f"{size} bytes, at most {MAX_BYTES}"] if size > MAX_BYTES else []
    for file in sorted(models.rglob("*.safetensors")):
        found += [] if (file.parent / "config.json").is_file() else [f"{file.relative_to(models)} has no config.json"]
    for config in sorted(models.rglob("config.json")):
        name = str(config.parent.relative_to(models))
        found += [f"{name}: {fault}" for fault in _faults_of_one(config.parent)]
        found += [] if name in index else [f"{name}: README.md does not name it"]
    return found


def _faults_of_one(model: Path) -> list[str]:
    try:
        config = json.loads((model / "config.json").read_text("utf-8"))
        shape = DraftShape if str(config["architectures"][0]).startswith("DFlash") else TargetShape
        shape.from_folder(model)
        weight_files(model)
    except ValueError as error:
        return [str(error)]
    found = [] if is_int8(config) else ["its weights are not in int8"]
    card = model / "README.md"
    front_matter = card.read_text("utf-8").split("---")[1:2] if card.is_file() else []
    return found if front_matter and _LICENSE.search(front_matter[0]) else [*found, "no README.md with a license"]


def test_every_model_here_has_a_card_and_can_be_served():
    assert faults(MODELS) == []


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two folders, both right."""
    quantization = int8_config(["Linear"], [])
    made = tmp_path / "models"
    (made / "toy").mkdir(parents=True)
    (made / "README.md").write_text("toy, and its drafter toy/draft")
    for path, config in ((made / "toy", TARGET), (made / "toy" / "draft", DRAFT)):
        folder(path, config, quantization_config=quantization)
        (path / "README.md").write_text(CARD)
        (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
        (path / "one.safetensors").write_bytes(b"")
    return made


def test_the_search_for_faults_finds_none_where_there_is_none(models: Path):
    assert faults(models) == []
    assert faults(models / "nothing") == []


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("README.md", None, "README.md is missing"),
        ("README.md", "toy", "toy/draft: README.md does not name it"),
        ("toy/README.md", None, "toy: no README.md with a license"),
        ("toy/draft/README.md", "license: none in the text", "toy/draft: no README.md with a license"),
        ("toy/draft/README.md", "---\nlicense:\n---\n", "toy/draft: no README.md with a license"),
        ("toy/config.json", json.dumps(TARGET), "toy: its weights are not in int8"),
        ("toy/config.json", '{"architectures": ["Other"]}', "['Other'] is not supported"),
        ("toy/config.json", None, "toy/one.safetensors has no config.json"),
        ("toy/draft/config.json", json.dumps(DRAFT | {"block_size": 1}), "block_size is 1"),
        ("toy/one.safetensors", None, "names 1 files that are not there"),
        ("toy/big.bin", "x" * (MAX_BYTES + 1), f"at most {MAX_BYTES}"),
    ],
)
def test_the_search_for_faults_finds_them(models: Path, file: str, text: str | None, fault: str):
    if text is None:
        (models / file).unlink()
    else:
        (models / file).write_text(text)
    assert any(fault in found for found in faults(models)), faults(models)
