"""Which dtype target and drafter are computed in, if the command names none."""

import logging
from pathlib import Path

import pytest

from launch.config import LaunchConfig
from launch.dtype import cpu_features, with_dtype
from tests.support.model_folders import TARGET, folder

NEW, OLD = {"avx512f", "avx512_bf16", "amx_bf16"}, {"avx2", "avx512f"}


def chosen(tmp_path: Path, stored: str, features: set[str], dtype: str = "auto") -> str:
    model = folder(tmp_path / "model", TARGET, torch_dtype=stored)
    return with_dtype(LaunchConfig(dtype=dtype), model, features).dtype


@pytest.mark.parametrize("features", [NEW, {"avx512_bf16"}, {"amx_bf16"}, {"asimd", "bf16"}])
def test_bfloat16_is_kept_where_the_cpu_multiplies_it(tmp_path: Path, features: set[str]) -> None:
    assert chosen(tmp_path, "bfloat16", features) == "bfloat16"


def test_without_such_instructions_a_bfloat16_checkpoint_runs_in_float32(tmp_path: Path) -> None:
    assert chosen(tmp_path, "bfloat16", OLD) == "float32"
    assert chosen(tmp_path, "bfloat16", set()) == "float32"


def test_float32_weights_are_never_rounded_unasked(tmp_path: Path) -> None:
    assert chosen(tmp_path, "float32", NEW) == "float32"
    assert chosen(tmp_path, "float32", OLD) == "float32"


def test_what_the_command_names_stands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert chosen(tmp_path, "float32", NEW, "bfloat16") == "bfloat16"
    assert chosen(tmp_path, "bfloat16", NEW, "float32") == "float32"
    assert not caplog.records


def test_one_line_says_which_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chosen(tmp_path, "bfloat16", NEW)
    chosen(tmp_path, "bfloat16", OLD)
    chosen(tmp_path, "float32", NEW)
    assert [record.message for record in caplog.records] == [
        "dtype=bfloat16, the faster one: the CPU multiplies it (amx_bf16, avx512_bf16)",
        "dtype=float32, the faster one: the CPU has no instructions for the checkpoint's bfloat16",
        "dtype=float32, as the checkpoint has it; bfloat16 would round its weights",
    ]


def test_the_features_of_a_cpu_are_read_in_the_kernels_words(tmp_path: Path) -> None:
    x86, arm = tmp_path / "x86", tmp_path / "arm"
    x86.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16\nbugs\t: none\nflags\t: other\n")
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert cpu_features(x86) == {"fpu", "avx512_bf16", "amx_bf16"}
    assert cpu_features(arm) == {"fp", "asimd", "bf16"}
    assert cpu_features(tmp_path / "none") == frozenset()
