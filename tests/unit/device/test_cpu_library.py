"""Kernels run only if they were built from the source that is there; otherwise torch does, and the log says why."""

import logging
import shutil
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from memsvc.device.cpu import library
from memsvc.device.cpu.digest import FOLDER, source_digest
from memsvc.device.cpu.kernels import load
from memsvc.device.cpu.library import open_library

LIBRARY = f"_kernels{EXTENSION_SUFFIXES[0]}"

needs_kernels = pytest.mark.skipif(load() is None, reason="the CPU kernels are not built, or not for this CPU")


@pytest.fixture
def folder(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the source and what was built of it."""
    monkeypatch.delenv("MEMSVC_INTERPRETED", raising=False)
    caplog.set_level(logging.INFO, library.logger.name)
    copy = tmp_path / "cpu"
    shutil.copytree(FOLDER, copy)
    return copy


@needs_kernels
def test_what_was_built_from_this_source_is_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_library(folder) is not None
    assert caplog.messages == ["cpu kernels=compiled"]


@needs_kernels
@pytest.mark.parametrize("name", ["attention.cpp", "bfloat16.h"])
def test_a_build_of_another_source_is_left_aside(name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (folder / name).open("a") as file:
        file.write("// changed\n")
    assert open_library(folder) is None
    assert caplog.messages == ["cpu kernels=torch reason=older than their source; make compile builds them"]


@needs_kernels
def test_a_build_whose_source_is_gone_is_left_aside(folder: Path) -> None:
    for path in [*folder.glob("*.cpp"), *folder.glob("*.h")]:
        path.unlink()
    assert open_library(folder) is None


def test_without_a_build_torch_does_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / LIBRARY).unlink(missing_ok=True)
    assert open_library(folder) is None
    assert caplog.messages == ["cpu kernels=torch reason=not built; make compile builds them"]


def test_a_file_that_is_no_library_does_no_harm(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / LIBRARY).write_bytes(b"no library")
    assert open_library(folder) is None
    assert "reason=OSError" in caplog.text


def test_the_environment_asks_for_torch(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSVC_INTERPRETED", "1")
    assert open_library(folder) is None
    assert "reason=MEMSVC_INTERPRETED is set" in caplog.text


@needs_kernels
def test_a_torch_that_lends_no_threads_keeps_its_own_code(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_torch_parallel_for", lambda: None)
    assert open_library(folder) is None
    assert "lends no threads" in caplog.text


@needs_kernels
def test_the_library_brings_no_threads_of_its_own() -> None:
    content = (FOLDER / LIBRARY).read_bytes()
    assert not [name for name in (b"libgomp", b"libomp", b"libiomp", b"libpthread", b"GOMP_") if name in content]


def test_the_digest_knows_names_and_contents(tmp_path: Path) -> None:
    assert source_digest(tmp_path) == ""
    (tmp_path / "a.cpp").write_text("one")
    first = source_digest(tmp_path)
    (tmp_path / "a.cpp").rename(tmp_path / "b.cpp")
    second = source_digest(tmp_path)
    (tmp_path / "c.h").write_text("")
    assert len({first, second, source_digest(tmp_path), ""}) == 4
