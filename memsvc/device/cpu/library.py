"""Finds the compiled kernels and makes sure that they are those of the source. torch lends them its threads."""

import ctypes
import logging
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from memsvc.device.cpu.digest import FOLDER, source_digest

logger = logging.getLogger(__name__)


def open_library(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """The library of the folder, ready for use; None, with a line in the log that says why, if it can't be used."""
    library, reason = _open(folder)
    if library is None:
        logger.info("cpu kernels=torch reason=%s", reason)
    else:
        logger.info("cpu kernels=compiled")
    return library


def _open(folder: Path) -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("MEMSVC_INTERPRETED", "") not in ("", "0"):
        return None, "MEMSVC_INTERPRETED is set"
    path = folder / f"_kernels{EXTENSION_SUFFIXES[0]}"
    if not path.is_file():
        return None, "not built; make compile builds them"
    parallel_for = _torch_parallel_for()
    if parallel_for is None:
        return None, f"torch {torch.__version__} lends no threads"
    try:
        library = ctypes.CDLL(str(path))
        library.source_digest.restype = ctypes.c_char_p
        if library.source_digest().decode() != source_digest(folder):
            return None, "older than their source; make compile builds them"
    except (OSError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"
    if not library.cpu_has_instructions():
        return None, "this CPU has no AVX-512 for bfloat16"
    library.set_parallel_for(parallel_for)
    return library, ""


def _torch_parallel_for() -> ctypes.c_void_p | None:
    """torch's stable C function for its thread pool: torch 2.10 and later have it."""
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_library.torch_parallel_for, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None
