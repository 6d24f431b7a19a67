"""What changes the name of a model, and what does not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memsvc.device.fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, the first of which has more bytes than are sampled at once."""
    (tmp_path / "config.json").write_text(json.dumps({"layers": 2}))
    for number, size in enumerate((1 << 15, 4)):
        save_file({"w": torch.arange(size, dtype=torch.float32)}, tmp_path / f"{number}.safetensors")
    return tmp_path


def test_the_same_has_the_same_name(folder: Path) -> None:
    first = fingerprint(folder, "auto", "float32", "", "auto")
    assert first == fingerprint(folder, "auto", "float32", "", "auto")
    assert len(first) == 32
    (folder / "README.md").write_text("words change nothing")
    assert first == fingerprint(folder, "auto", "float32", "", "auto")


def test_arithmetic_config_and_weights_change_it(folder: Path) -> None:
    names = {
        fingerprint(folder, "auto", "float32", "", "auto"),
        fingerprint(folder, "auto", "bfloat16", "", "auto"),
        fingerprint(folder, "auto", "float32", "fp8", "auto"),
        fingerprint(folder, "auto", "float32", "", "fp8_e4m3"),
        fingerprint(folder, "dummy", "float32", "", "auto"),
    }
    save_file({"w": torch.arange(1 << 15, dtype=torch.float32).flip(0)}, folder / "0.safetensors")
    names.add(fingerprint(folder, "auto", "float32", "", "auto"))
    (folder / "1.safetensors").rename(folder / "2.safetensors")
    names.add(fingerprint(folder, "auto", "float32", "", "auto"))
    (folder / "config.json").write_text(json.dumps({"layers": 3}))
    names.add(fingerprint(folder, "auto", "float32", "", "auto"))
    assert len(names) == 8


def test_random_weights_are_named_by_the_config_alone(folder: Path) -> None:
    first = fingerprint(folder, "dummy", "float32")
    (folder / "0.safetensors").unlink()
    assert first == fingerprint(folder, "dummy", "float32")
