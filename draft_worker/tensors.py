"""Finds a drafter's tensors under the names that different authors give them, and refuses what is left over."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from draft_worker.shape import DraftShape
from memsvc.device.checkpoint import CheckpointReader, TensorSource, listed, load_source

_OTHER_NAMES = (
    ("fc.", "encoder.fc."),
    ("hidden_norm.", "encoder.output_norm_enc."),
    ("layers.0.", "midlayer."),
)
"""(prefix here, prefix in some files)."""

_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
"""Bare parameters in the published files, modules with a weight in others."""

_NOT_NEEDED = (".inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
"""Endings of names that carry nothing of the drafter's own."""

_VOCAB_MAPS = ("d2t", "t2d")


@contextmanager
def open_source(folder: Path, load_format: str, device: str) -> Iterator[TensorSource]:
    """The tensors that --load-format names, their files closed at the end of the block."""
    source = load_source(folder, load_format, device)
    if isinstance(source, CheckpointReader):
        with source:
            yield source
    else:
        yield source


def spellings(name: str) -> Iterator[str]:
    """The names under which a file may hold the tensor called `name` here, that one first."""
    forms = [name]
    forms += [other + name.removeprefix(ours) for ours, other in _OTHER_NAMES if name.startswith(ours)]
    if name in _CODEBOOKS:
        forms.append(f"{name}.weight")
    for prefix in ("", "model."):
        for form in forms:
            yield prefix + form


class DraftTensors:
    """A drafter's tensors by their names in the published layout, all converted to one dtype."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, *, has_files: bool) -> None:
        """has_files: source reads a checkpoint. Random weights hold any name, so optional ones are absent there."""
        self._source = source
        self._has_files = has_files
        self.dtype = dtype

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of that shape. Raises ValueError naming it if it is missing or shaped otherwise."""
        found = next((form for form in spellings(name) if self._source.has(form)), name)
        return self._source.get(found, shape, self.dtype)

    def find(self, name: str, *shape: int) -> torch.Tensor | None:
        """get, or None where the checkpoint has no such tensor."""
        if not self._has_files or not any(self._source.has(form) for form in spellings(name)):
            return None
        return self.get(name, *shape)

    def refuse_leftovers(self) -> None:
        """Raise ValueError if the checkpoint holds tensors that the config does not account for.

        A loader that passed over them would serve another drafter than the one that was trained.
        """
        left = [name for name in self._source.unused() if not _is_not_needed(name)]
        if left:
            raise ValueError(f"{len(left)} tensors that config.json does not account for: {listed(left)}")


def _is_not_needed(name: str) -> bool:
    return name.endswith(_NOT_NEEDED) or name.removeprefix("model.") in _VOCAB_MAPS


def read_vocab_map(folder: Path, shape: DraftShape) -> torch.Tensor:
    """Token id of every row of a reduced head, int64 [draft V].

    d2t holds token id minus row; t2d marks the token ids that have a row. Either is enough.
    Raises ValueError if neither is there or they do not fit the sizes or each other.
    """
    maps = dict(_integer_tensors(folder))
    if not maps:
        raise ValueError(f"draft_vocab_size {shape.draft_vocab_size} < {shape.vocab_size}, but there is no d2t or t2d")
    marked = torch.nonzero(maps["t2d"]).flatten() if "t2d" in maps else None
    ids = torch.arange(shape.draft_vocab_size) + maps["d2t"] if "d2t" in maps and _fits(maps["d2t"], shape) else marked
    if ids is None or len(ids) != shape.draft_vocab_size:
        sizes = {name: list(tensor.shape) for name, tensor in maps.items()}
        raise ValueError(f"{sizes} do not give one token id for each of {shape.draft_vocab_size} head rows")
    if ids.min() < 0 or ids.max() >= shape.vocab_size or len(ids.unique()) != len(ids):
        raise ValueError(
            f"d2t gives token ids in [{ids.min()}, {ids.max()}], or twice the same; need {shape.vocab_size}"
        )
    if marked is not None and not torch.equal(ids.sort().values, marked):
        raise ValueError("d2t and t2d name different tokens")
    return ids


def _fits(d2t: torch.Tensor, shape: DraftShape) -> bool:
    return d2t.shape == (shape.draft_vocab_size,)


def _integer_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name.removeprefix("model.") in _VOCAB_MAPS:
                    yield name.removeprefix("model."), opened.get_tensor(name).to(torch.int64)
