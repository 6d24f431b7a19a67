"""The allocator: frames, tree, requests and clients as plain data. No I/O, no tensors, no threads.

The modules run interpreted, or compiled by mypyc from the same files (setup.py). COMPILED says which.
A file that is newer than its compiled form, or the environment variable MEMSVC_INTERPRETED=1, makes
the whole package interpreted, so that what runs is always what the files say.
"""

import logging
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent


class _SourceFinder:
    """Finds the modules of this package as .py files, where the import system would prefer an extension."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module's source, or None if it is none of ours."""
        package, _, module = name.rpartition(".")
        source = _FOLDER / f"{module}.py"
        return spec_from_file_location(name, source) if package == __name__ and source.is_file() else None


def _is_stale(extension: Path) -> bool:
    source = _FOLDER / f"{extension.name.partition('.')[0]}.py"
    return not source.is_file() or source.stat().st_mtime > extension.stat().st_mtime


def _runs_compiled() -> bool:
    extensions = [path for path in _FOLDER.iterdir() if path.name.endswith(EXTENSION_SUFFIXES[0])]
    if not extensions or os.environ.get("MEMSVC_INTERPRETED", "") not in ("", "0"):
        return False
    stale = sorted(path.name.partition(".")[0] for path in extensions if _is_stale(path))
    if stale:
        logger.warning("core runs interpreted: older than their source are %s; make compile builds them", stale)
    return not stale


COMPILED = _runs_compiled()
"""The allocator runs as a C extension."""
if not COMPILED:
    sys.meta_path.insert(0, _SourceFinder)
