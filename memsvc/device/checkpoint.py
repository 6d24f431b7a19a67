"""Weights by name: from a folder's safetensors files, or random ones of the same shapes."""

import math
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from memsvc.device.hf_config import read_json
from memsvc.device.int8 import FLOATS, dequantise_rows
from memsvc.device.quant_config import SCALE_SUFFIX, ZERO_POINT_SUFFIX

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
LOAD_FORMATS = ("auto", "dummy")

Form = tuple[int, ...]
"""A tensor's sizes."""


class StoredTensor(NamedTuple):
    """What a checkpoint says of a tensor."""

    file: str
    form: Form


class TensorSource(Protocol):
    """Where a model's tensors come from."""

    def get(self, name: str, shape: Form, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of that name and shape, converted to dtype. ValueError if it is missing or shaped otherwise."""
        ...

    def has(self, name: str) -> bool:
        """Whether the source holds that name."""
        ...

    def unused(self) -> list[str]:
        """Names in the source that nobody asked for."""
        ...


class CheckpointReader:
    """The safetensors of a Hugging Face folder, one file or sharded. Use as a context manager.

    Files are mapped, so a tensor that keeps its dtype on the CPU is not copied. A matrix stored in int8, as
    memsvc.device.quant_config describes it, is given in floats like any other; its scales need not be asked for.
    """

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        """Raises ValueError if the folder has no safetensors, or an index that names a missing file."""
        self.folder = folder
        self.device = str(device)
        self._stack = ExitStack()
        self._file_of = _file_of_names(folder)
        self._open: dict[str, safe_open] = {}
        self._asked: set[str] = set()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()
        self._stack.close()

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds that name."""
        return name in self._file_of

    def get(self, name: str, shape: Form, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of that name. Raises ValueError naming it and both shapes if it does not fit."""
        tensor = self._read(name, shape)
        if tensor.dtype == torch.int8:
            return dequantise_rows(tensor, self._scale(name, shape), dtype)
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} in {self._file_of[name]} is {tensor.dtype}, supported are floats and int8")
        return tensor.to(dtype)

    def unused(self) -> list[str]:
        """Names that were never asked for, sorted."""
        return sorted(set(self._file_of) - self._asked)

    def stored(self) -> dict[str, StoredTensor]:
        """What the files say of all tensors, in order of their names, without reading one.

        What belongs to a matrix in int8, its scales or zero points, is left out: get asks for it or refuses it.
        """
        found, beside = {}, set()
        for name, file_name in sorted(self._file_of.items()):
            try:
                header = self._file(file_name).get_slice(name)
            except SafetensorError as exc:
                raise self._unreadable(name, exc) from exc
            found[name] = StoredTensor(file_name, tuple(header.get_shape()))
            if header.get_dtype() == "I8":
                beside |= {name + SCALE_SUFFIX, name + ZERO_POINT_SUFFIX}
        return {name: tensor for name, tensor in found.items() if name not in beside}

    def _unreadable(self, name: str, exc: SafetensorError) -> ValueError:
        return ValueError(f"{self.folder / self._file_of[name]}: cannot read {name}: {exc}")

    def _read(self, name: str, shape: Form) -> torch.Tensor:
        file_name = self._file_of.get(name)
        if file_name is None:
            raise ValueError(f"{self.folder} has no tensor {name} (wanted {list(shape)})")
        self._asked.add(name)
        try:
            tensor = self._file(file_name).get_tensor(name)
        except SafetensorError as exc:
            raise self._unreadable(name, exc) from exc
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} in {file_name} is {list(tensor.shape)}, the config asks for {list(shape)}")
        return tensor

    def _scale(self, name: str, shape: Form) -> torch.Tensor:
        """The scales of an int8 matrix of that shape."""
        if len(shape) != 2:
            raise ValueError(f"{name} in {self._file_of[name]} is int8 {list(shape)}, only matrices may be")
        if self.has(name + ZERO_POINT_SUFFIX):
            raise ValueError(f"{name}{ZERO_POINT_SUFFIX} is there: int8 with zero points is not supported")
        scale = self._read(name + SCALE_SUFFIX, (shape[0], 1))
        if scale.dtype not in FLOATS:
            raise ValueError(f"{name}{SCALE_SUFFIX} is {scale.dtype}, scales are floats")
        wrong = ~(scale.isfinite() & (scale > 0))
        if bool(wrong.any()):
            raise ValueError(f"{name}{SCALE_SUFFIX}: {int(wrong.sum())} of {len(scale)} scales are not above 0")
        return scale

    def _file(self, file_name: str) -> safe_open:
        if file_name not in self._open:
            opened = safe_open(str(self.folder / file_name), framework="pt", device=self.device)
            self._open[file_name] = self._stack.enter_context(opened)
        return self._open[file_name]


def listed(names: Sequence[str], most: int = 8) -> str:
    """The names, or the first of them and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def weight_files(folder: Path) -> list[str]:
    """Names of the files that hold a folder's weights. Raises ValueError as CheckpointReader does."""
    return sorted(set(_file_of_names(folder).values()))


def _file_of_names(folder: Path) -> dict[str, str]:
    """Tensor name to file name."""
    if (folder / INDEX_FILE).is_file():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX_FILE} has no weight_map")
        missing = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
        if missing:
            raise ValueError(f"{folder / INDEX_FILE} names {len(missing)} files that are not there: {missing[:3]}")
        return weight_map
    path = folder / SINGLE_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read")
    try:
        with safe_open(str(path), framework="pt") as opened:
            return dict.fromkeys(opened.keys(), SINGLE_FILE)
    except SafetensorError as exc:
        raise ValueError(f"{path} is not a safetensors file: {exc}") from exc


class RandomSource:
    """Random weights that keep activations near unit size, the same for the same seed, name and shape.

    For load tests and geometry benchmarks: no file is read. Norm weights are 1, biases 0.
    """

    def __init__(self, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.seed = seed
        self.device = torch.device(device)

    def has(self, name: str) -> bool:
        """True: any tensor can be made."""
        return True

    def get(self, name: str, shape: Form, dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor of that shape."""
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=dtype, device=self.device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.seed ^ zlib.crc32(name.encode()))
        out = torch.empty(shape, dtype=dtype, device=self.device)
        return out.normal_(0.0, 1.0 / math.sqrt(shape[-1]), generator=generator)

    def unused(self) -> list[str]:
        """Nothing is left over."""
        return []


def load_source(folder: Path, load_format: str, device: torch.device | str) -> CheckpointReader | RandomSource:
    """The source that --load-format names: auto reads the folder, dummy makes random weights."""
    match load_format:
        case "auto":
            return CheckpointReader(folder, device)
        case "dummy":
            return RandomSource(device=device)
        case _:
            raise ValueError(f"load format {load_format!r} is not known; known are {', '.join(LOAD_FORMATS)}")
