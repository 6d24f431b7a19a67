"""Weights by name: from a folder's safetensors files, or random ones of the same shapes."""

import math
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from memsvc.device.fp8 import E4M3, QuantRows, quantise_weight
from memsvc.device.hf_config import read_json
from memsvc.device.int8 import FLOATS
from memsvc.device.quant_config import BLOCK_SCALE_SUFFIX, HEADER_FP8, SCALE_SUFFIX, ZERO_POINT_SUFFIX
from memsvc.device.scaled_weights import CODES, block_form, scaled

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

    def get_fp8(self, name: str, shape: Form, dtype: torch.dtype) -> QuantRows:
        """A matrix in e4m3 with one scale a row, for products in dtype: as it is stored, or rounded now."""
        ...

    def has(self, name: str) -> bool:
        """Whether the source holds that name."""
        ...

    def unused(self) -> list[str]:
        """Names in the source that nobody asked for."""
        ...


class CheckpointReader:
    """The safetensors of a Hugging Face folder, one file or sharded. Use as a context manager.

    Files are mapped, so a tensor that keeps its dtype on the CPU is not copied. A matrix stored in int8 or
    fp8, as memsvc.device.quant_config describes them, is given in floats like any other; its scales need not be asked for.
    """

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        """Raises ValueError if the folder has no safetensors, or an index that names a missing file."""
        self.folder = folder
        self.device = str(device)
        self._stack = ExitStack()
        self._file_of = _file_of_names(folder)
        self._open: dict[str, safe_open] = {}
        self._asked: set[str] = set()
        self._fp8_names: frozenset[str] | None = None

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
        if tensor.dtype in CODES:
            return scaled(tensor, self._scales(name, tensor), dtype)
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} in {self._file_of[name]} is {tensor.dtype}, supported are floats, int8 and e4m3")
        return tensor.to(dtype)

    def get_fp8(self, name: str, shape: Form, dtype: torch.dtype) -> QuantRows:
        """The matrix in 8 bits. What is stored in e4m3 with a scale a row stays as it is; blocks are rounded anew."""
        if name not in self.fp8_names():
            return _rounded(name, self.get(name, shape, dtype), dtype)
        tensor = self._read(name, shape)
        scales = self._scales(name, tensor)
        if scales.shape == (len(tensor), 1):
            return QuantRows(tensor.contiguous(), scales.float(), dtype)
        return _rounded(name, scaled(tensor, scales, torch.float32), dtype)

    def fp8_names(self) -> frozenset[str]:
        """Tensors that are stored in e4m3."""
        if self._fp8_names is None:
            found = [name for name in self._file_of if self._header(name).get_dtype() == HEADER_FP8]
            self._fp8_names = frozenset(found)
        return self._fp8_names

    def unused(self) -> list[str]:
        """Names that were never asked for, sorted."""
        return sorted(set(self._file_of) - self._asked)

    def stored(self) -> dict[str, StoredTensor]:
        """What the files say of all tensors, in order of their names, without reading one.

        What belongs to a matrix in 8 bits, its scales or zero points, is left out: get asks for it or refuses it.
        """
        found, beside = {}, set()
        for name, file_name in sorted(self._file_of.items()):
            header = self._header(name)
            found[name] = StoredTensor(file_name, tuple(header.get_shape()))
            if header.get_dtype() in ("I8", HEADER_FP8):
                beside |= {name + suffix for suffix in (SCALE_SUFFIX, BLOCK_SCALE_SUFFIX, ZERO_POINT_SUFFIX)}
        return {name: tensor for name, tensor in found.items() if name not in beside}

    def _header(self, name: str) -> Any:
        try:
            return self._file(self._file_of[name]).get_slice(name)
        except SafetensorError as exc:
            raise self._unreadable(name, exc) from exc

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

    def _scales(self, name: str, codes: torch.Tensor) -> torch.Tensor:
        """Of a matrix in 8 bits: one a row, [out, 1], or one a block."""
        form, kind = tuple(codes.shape), "int8" if codes.dtype == torch.int8 else "e4m3"
        if len(form) != 2:
            raise ValueError(f"{name} in {self._file_of[name]} is {kind} {list(form)}, only matrices may be")
        if self.has(name + ZERO_POINT_SUFFIX):
            raise ValueError(f"{name}{ZERO_POINT_SUFFIX} is there: {kind} with zero points is not supported")
        is_blocks = codes.dtype == E4M3 and self.has(name + BLOCK_SCALE_SUFFIX)
        beside = name + (BLOCK_SCALE_SUFFIX if is_blocks else SCALE_SUFFIX)
        scales = self._read(beside, block_form(form) if is_blocks else (form[0], 1))
        if scales.dtype not in FLOATS:
            raise ValueError(f"{beside} is {scales.dtype}, scales are floats")
        wrong = ~(scales.isfinite() & (scales > 0))
        if bool(wrong.any()):
            raise ValueError(f"{beside}: {int(wrong.sum())} of {scales.numel()} scales are not above 0")
        return scales

    def _file(self, file_name: str) -> safe_open:
        if file_name not in self._open:
            opened = safe_open(str(self.folder / file_name), framework="pt", device=self.device)
            self._open[file_name] = self._stack.enter_context(opened)
        return self._open[file_name]


def _rounded(name: str, weight: torch.Tensor, dtype: torch.dtype) -> QuantRows:
    try:
        return quantise_weight(weight, dtype)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


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

    def get_fp8(self, name: str, shape: Form, dtype: torch.dtype) -> QuantRows:
        """get, rounded to 8 bits."""
        return quantise_weight(self.get(name, shape, dtype), dtype)

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
