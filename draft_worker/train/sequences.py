"""Many token sequences in a few flat arrays, and the files that hold them."""

import lzma
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

SUFFIX = ".safetensors.xz"
_MAX_PROBE = 500_000
"""Tokens that are compressed to guess how many fit into a file."""
_MARGIN = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """n sequences. Sequence i is tokens[ends[i - 1] : ends[i]]."""

    tokens: np.ndarray
    """All tokens one after another: uint16 where the vocabulary allows it, else int32."""
    ends: np.ndarray
    """int64 [n]"""
    prompt_lens: np.ndarray
    """int32 [n]: leading tokens that are the prompt."""
    temperatures: np.ndarray
    """float32 [n]: of the answer; 0 = greedy."""
    groups: np.ndarray
    """int32 [n]: in answers the number of the prompt, in prompts the kind of source."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        start = self.ends[index - 1] if index else 0
        return self.tokens[start : self.ends[index]]

    @property
    def lens(self) -> np.ndarray:
        """int64 [n]"""
        return np.diff(self.ends, prepend=0)

    def select(self, indices: np.ndarray) -> "Sequences":
        """Those sequences, in that order."""
        parts = [self[int(index)] for index in indices]
        return Sequences(
            tokens=np.concatenate(parts) if parts else self.tokens[:0],
            ends=np.cumsum([len(part) for part in parts], dtype=np.int64),
            prompt_lens=self.prompt_lens[indices],
            temperatures=self.temperatures[indices],
            groups=self.groups[indices],
        )

    def to_bytes(self) -> bytes:
        """One safetensors file, compressed."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in Sequences.__slots__}
        return lzma.compress(save(arrays), preset=1)


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The smallest dtype that holds the vocabulary's ids."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def from_lists(tokens: Sequence[Sequence[int]], vocab_size: int, groups: Sequence[int]) -> Sequences:
    """Prompts: sequences without an answer."""
    lens = np.array([len(part) for part in tokens], dtype=np.int64)
    flat = np.fromiter((token for part in tokens for token in part), dtype=np.int64, count=int(lens.sum()))
    if len(flat) and not 0 <= flat.min() <= flat.max() < vocab_size:
        raise ValueError(f"token ids lie in [{flat.min()}, {flat.max()}], the vocabulary has {vocab_size}")
    return Sequences(
        tokens=flat.astype(token_dtype(vocab_size)),
        ends=np.cumsum(lens),
        prompt_lens=lens.astype(np.int32),
        temperatures=np.zeros(len(lens), dtype=np.float32),
        groups=np.asarray(groups, dtype=np.int32),
    )


def joined(parts: Iterable[Sequences]) -> Sequences:
    """All of them, one after another."""
    parts = list(parts)
    if not parts:
        raise ValueError("there are no sequences")
    return Sequences(
        tokens=np.concatenate([part.tokens for part in parts]),
        ends=np.cumsum(np.concatenate([part.lens for part in parts])),
        prompt_lens=np.concatenate([part.prompt_lens for part in parts]),
        temperatures=np.concatenate([part.temperatures for part in parts]),
        groups=np.concatenate([part.groups for part in parts]),
    )


def read_sequences(path: Path) -> Sequences:
    """Those of a file, or of all files of a folder in order of name. Raises ValueError if there are none."""
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"{path} holds no {SUFFIX} file")
    with ThreadPoolExecutor() as pool:
        return joined(pool.map(lambda file: Sequences(**load(lzma.decompress(file.read_bytes()))), files))


def write_sequences(folder: Path, stem: str, sequences: Sequences, max_bytes: int) -> list[Path]:
    """Files stem-000.safetensors.xz and on, none larger than max_bytes. Files of that stem before are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{stem}-*{SUFFIX}"):
        old.unlink()
    with ThreadPoolExecutor() as pool:
        packed = [
            made for part in pool.map(lambda p: _packed(p, max_bytes), _parts(sequences, max_bytes)) for made in part
        ]
    files = []
    for number, content in enumerate(packed):
        file = folder / f"{stem}-{number:03d}{SUFFIX}"
        file.write_bytes(content)
        files.append(file)
    return files


def _parts(sequences: Sequences, max_bytes: int) -> list[Sequences]:
    """Cuts of about the size that compresses to max_bytes."""
    num_tokens = len(sequences.tokens)
    probe = sequences.select(np.flatnonzero(sequences.ends <= _MAX_PROBE)) if num_tokens > _MAX_PROBE else sequences
    per_token = len(probe.to_bytes()) / max(1, len(probe.tokens))
    num_parts = max(1, int(np.ceil(num_tokens * per_token / (max_bytes * _MARGIN))))
    edges = np.searchsorted(sequences.ends, np.linspace(0, num_tokens, num_parts + 1), side="left")
    edges[-1] = len(sequences)
    return [sequences.select(np.arange(start, end)) for start, end in pairwise(edges) if end > start]


def _packed(part: Sequences, max_bytes: int) -> list[bytes]:
    content = part.to_bytes()
    if len(content) <= max_bytes or len(part) == 1:
        return [content]
    half = len(part) // 2
    return _packed(part.select(np.arange(half)), max_bytes) + _packed(
        part.select(np.arange(half, len(part))), max_bytes
    )
