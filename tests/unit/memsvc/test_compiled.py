"""The allocator runs as its files say, compiled or not."""

import os
import shutil
import subprocess
import sys
import time
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import memsvc

ASK = "import memsvc.core as core, memsvc.core.errors as errors; print(core.COMPILED, errors.__file__)"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of memsvc without extensions; returns its core folder."""
    source = Path(memsvc.__file__).parent
    shutil.copytree(source, tmp_path / "memsvc", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path / "memsvc" / "core"


def ask(core: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter finds in that copy."""
    plain = {name: value for name, value in os.environ.items() if name != "MEMSVC_INTERPRETED"}
    env = plain | {"PYTHONPATH": str(core.parent.parent)} | environment
    return subprocess.run([sys.executable, "-c", ASK], env=env, cwd=core.parent.parent, capture_output=True, text=True)


def add_extension(core: Path, age_s: float) -> Path:
    """A file that would be loaded as the compiled errors.py, and can't be."""
    extension = core / f"errors{EXTENSION_SUFFIXES[0]}"
    extension.write_bytes(b"no extension")
    at = time.time() - age_s
    os.utime(extension, (at, at))
    for source in core.glob("*.py"):
        os.utime(source, (time.time() - 100, time.time() - 100))
    return extension


def test_without_extensions_the_sources_run(package: Path) -> None:
    done = ask(package)
    assert done.stdout.split() == ["False", str(package / "errors.py")], done.stderr


def test_an_extension_newer_than_its_source_is_what_runs(package: Path) -> None:
    add_extension(package, age_s=0)
    assert "ImportError" in ask(package).stderr


def test_an_extension_older_than_its_source_is_left_aside_with_a_warning(package: Path) -> None:
    add_extension(package, age_s=200)
    done = ask(package)
    assert done.stdout.split() == ["False", str(package / "errors.py")], done.stderr
    assert "older than their source are ['errors']" in done.stderr


def test_an_extension_whose_source_is_gone_counts_as_stale(package: Path) -> None:
    add_extension(package, age_s=0).rename(package / f"gone{EXTENSION_SUFFIXES[0]}")
    assert "older than their source are ['gone']" in ask(package).stderr


def test_the_environment_asks_for_the_sources(package: Path) -> None:
    add_extension(package, age_s=0)
    done = ask(package, MEMSVC_INTERPRETED="1")
    assert done.stdout.split() == ["False", str(package / "errors.py")], done.stderr
