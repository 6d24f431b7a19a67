"""The directory of one run: sockets and configs, for this user alone, gone at the end."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memsvc.transport import check_endpoint, check_run_dir
from memsvc.wire.links import LINKS

_PREFIX = "memsvc-"


@contextmanager
def run_directory(asked: str = "") -> Iterator[Path]:
    """A fresh directory of mode 0700, or the asked one, which must be empty. Raises ValueError or OSError.

    Paths of sockets are limited to about a hundred bytes, so a long temporary directory is passed over.
    """
    path = _asked(Path(asked).absolute()) if asked else _fresh()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _asked(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(path.iterdir()):
        # It is removed at the end, so it must hold nothing of anyone else.
        raise ValueError(f"--run-dir {path} is not empty")
    check_run_dir(path)
    _check_length(path)
    return path


def _fresh() -> Path:
    parents = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    problem: Exception = ValueError("no temporary directory")
    for parent in filter(None, parents):
        try:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            problem = error
            continue
        try:
            _check_length(path)
        except ValueError as error:
            problem = error
            path.rmdir()
            continue
        return path
    raise problem


def _check_length(path: Path) -> None:
    for link in LINKS:
        check_endpoint(link.endpoint(path))
