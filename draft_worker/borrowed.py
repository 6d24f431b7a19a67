"""The target's embedding and output head, which a drafter uses as its own."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draft_worker.shape import DraftShape
from draft_worker.tensors import open_source
from memsvc.device.checkpoint import TensorSource
from memsvc.device.hf_config import get_int, read_config, read_json
from memsvc.device.shared_weights import SharedWeights

_EMBEDDING_NAMES = tuple(
    f"{prefix}embed_tokens.weight" for prefix in ("model.", "model.language_model.", "language_model.model.", "")
)
_HEAD_NAMES = ("lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, slots=True)
class LateRows:
    """A copy of some rows of a matrix that the target may not have filled yet."""

    out: torch.Tensor
    """[n, H]"""
    matrix: torch.Tensor
    """[V, H]"""
    ids: torch.Tensor
    """int64 [n]"""

    def fill(self) -> None:
        """Copy the rows as they are now, into the same memory as ever."""
        torch.index_select(self.matrix, 0, self.ids, out=self.out)


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Tensors of the target. On the CPU they are maps of its files, shared with the target through the page cache.

    On a CUDA device they are views of the arena, and the target fills them while this worker loads.
    """

    embedding: torch.Tensor
    """[V, H]"""
    head: torch.Tensor
    """[V, H], the embedding itself if tied."""
    is_filled: bool = True
    """False: only after the target's first DraftHello."""
    late: list[LateRows] = field(default_factory=list)
    """What has to be filled then."""

    def rows(self, matrix: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """A copy [n, H] of rows ids int64 [n] of one of the two; its contents may come late."""
        if self.is_filled:
            return matrix[ids]
        out = matrix.new_zeros((len(ids), matrix.shape[1]))
        self.late.append(LateRows(out, matrix, ids.to(matrix.device)))
        return out


def view_shared(target_path: Path, shape: DraftShape, shared: SharedWeights) -> Borrowed:
    """What the target puts into the arena. Raises ValueError if this target is not the one the drafter is for."""
    _check_target(target_path, shape)
    return Borrowed(shared.embedding, shared.head, is_filled=False)


def borrow(target_path: Path, shape: DraftShape, load_format: str, dtype: torch.dtype, device: str) -> Borrowed:
    """Read them from the target's folder. Raises ValueError if this target is not the one the drafter is for."""
    tied = _check_target(target_path, shape)
    size = (shape.vocab_size, shape.hidden_size)
    with open_source(target_path, load_format, device) as source:
        embedding = source.get(_present(source, _EMBEDDING_NAMES), size, dtype)
        head_name = _present(source, _HEAD_NAMES)
        if tied or (tied is None and not source.has(head_name)):
            return Borrowed(embedding, embedding)
        return Borrowed(embedding, source.get(head_name, size, dtype))


def _check_target(target_path: Path, shape: DraftShape) -> bool | None:
    """Whether the target's head is its embedding, as far as its config says. Raises ValueError on another target."""
    config = read_config(target_path)
    text: dict[str, Any] = config.get("text_config") or config
    width, vocab_size = get_int(text, "hidden_size"), get_int(text, "vocab_size")
    depth = get_int(text, "num_hidden_layers")
    if (width, vocab_size) != (shape.hidden_size, shape.vocab_size):
        raise ValueError(
            f"the drafter is for a target with hidden_size {shape.hidden_size} and vocab_size {shape.vocab_size},"
            f" {target_path} has {width} and {vocab_size}"
        )
    if width != shape.target_hidden_size:
        raise ValueError(f"target_hidden_size is {shape.target_hidden_size}, {target_path} has {width}")
    if max(shape.target_layer_ids) >= depth or shape.num_target_layers not in (0, depth):
        raise ValueError(
            f"the drafter taps layers {list(shape.target_layer_ids)} of {shape.num_target_layers or '?'},"
            f" {target_path} has {depth} layers"
        )
    return config.get("tie_word_embeddings", text.get("tie_word_embeddings"))


def _present(source: TensorSource, names: tuple[str, ...]) -> str:
    return next((name for name in names if source.has(name)), names[0])


def eos_token_ids(target_path: Path) -> list[int]:
    """Token ids that end an answer, from config.json and generation_config.json of the target's folder."""
    config = read_config(target_path)
    configs: list[dict[str, Any]] = [config, config.get("text_config") or {}]
    generation = target_path / "generation_config.json"
    if generation.is_file():
        configs.append(read_json(generation))
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(ids)
