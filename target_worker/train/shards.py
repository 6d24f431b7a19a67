"""The corpus as tokens, in files that are small enough to be sent one by one."""

import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from memsvc.device.shards import FILE_BYTES

SUFFIX = ".safetensors.xz"
TRAIN, HELD_OUT = "train", "heldout"
"""Stems of the two kinds of files."""

_HEADER_BYTES = 4096
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 1, "pb": 1}]
"""Contexts of two bytes: a token's low and high byte are told apart."""


def write_shards(folder: Path, stem: str, documents: Sequence[np.ndarray], max_bytes: int = FILE_BYTES) -> list[Path]:
    """Files stem-000.safetensors.xz and on, in the order of the documents (uint16 each, none cut).

    Files of that stem before are removed. Raises ValueError if one document alone is too large for a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{stem}-*{SUFFIX}"):
        old.unlink()
    files = []
    for number, part in enumerate(_parts(documents, max_bytes)):
        arrays = {
            "tokens": np.concatenate(part).astype(np.uint16),
            "ends": np.cumsum([len(document) for document in part], dtype=np.int64),
        }
        file = folder / f"{stem}-{number:03d}{SUFFIX}"
        file.write_bytes(lzma.compress(save(arrays), filters=_FILTERS))
        files.append(file)
    return files


def read_tokens(folder: Path, stem: str) -> np.ndarray:
    """uint16 [tokens]: the documents one after another, each with its end token. Raises ValueError if there are none."""
    return np.concatenate([arrays["tokens"] for arrays in _read(folder, stem)])


def read_documents(folder: Path, stem: str) -> list[np.ndarray]:
    """uint16 [tokens of it] for each document, its end token included. Raises ValueError if there are none."""
    return [part for arrays in _read(folder, stem) for part in np.split(arrays["tokens"], arrays["ends"][:-1])]


def _read(folder: Path, stem: str) -> list[dict[str, np.ndarray]]:
    files = sorted(folder.glob(f"{stem}-*{SUFFIX}"))
    if not files:
        raise ValueError(f"{folder} holds no {stem}-000{SUFFIX}")
    return [load(lzma.decompress(file.read_bytes())) for file in files]


def _parts(documents: Sequence[np.ndarray], max_bytes: int) -> list[list[np.ndarray]]:
    """The documents in their order, as many together as a file surely holds."""
    room = max_bytes - _HEADER_BYTES
    parts: list[list[np.ndarray]] = []
    free = -1
    for document in documents:
        size = 2 * len(document) + 8
        if size > room:
            raise ValueError(f"a document of {len(document)} tokens takes {size} bytes, a file holds {room}")
        if size > free:
            parts.append([])
            free = room
        parts[-1].append(document)
        free -= size
    return parts
