"""`python -m memsvc.device.pack`: a model's folder with its matrices in int8, about half the size of bf16."""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from memsvc.device.checkpoint import weight_files
from memsvc.device.hf_config import read_config
from memsvc.device.int8 import FLOATS, dequantise_rows, quantise_rows
from memsvc.device.quant_config import SCALE_SUFFIX, ZERO_POINT_SUFFIX, int8_config, is_quantised
from memsvc.device.shards import FILE_BYTES, write_shards

COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template.*", "mask_embedding.safetensors", "README.md", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files that go along as they are."""

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions:
    """How a folder is packed."""

    max_bytes: int = FILE_BYTES
    """Largest file of weights; a larger model is cut into several with an index."""
    min_elements: int = 1 << 14
    """Matrices with fewer numbers stay as they are: little to save, and often the most sensitive."""
    keep: str = ""
    """Matrices whose name this regular expression finds stay as they are."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "min_elements"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, the least is 1")
        try:
            re.compile(self.keep)
        except re.error as exc:
            raise ValueError(f"--keep {self.keep!r} is not a regular expression: {exc}") from exc


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """What came of it."""

    num_matrices: int
    """Matrices in int8."""
    bytes_before: int
    """Weight files of the source."""
    bytes_after: int
    """Weight files written."""
    worst_error: float
    """Largest relative error of a matrix: root of squared error over squared weights."""
    worst_name: str
    """That matrix; empty if there is none."""


def pack_folder(source: Path, out: Path, options: PackOptions) -> Packed:
    """Write into out what source holds, matrices in int8. A subfolder is not looked at: it is packed by itself.

    Raises ValueError if out is not empty, or source is quantised already or has no safetensors.
    """
    config = read_config(source)
    if is_quantised(config):
        raise ValueError(f"{source / 'config.json'} has a quantization_config: it is packed already")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder")
    before = [source / name for name in weight_files(source)]
    tensors: dict[str, torch.Tensor] = {}
    kept: list[str] = []
    errors = {"": 0.0}
    for name, tensor in _tensors(before):
        if not _is_packable(name, tensor, options):
            tensors[name] = tensor
            kept += [name] if tensor.dim() == 2 and name.endswith(".weight") else []
            continue
        codes, scale = _quantised(name, tensor)
        tensors |= {name: codes, name + SCALE_SUFFIX: scale}
        errors[name] = _relative_error(tensor, dequantise_rows(codes, scale, torch.float32))
    out.mkdir(parents=True, exist_ok=True)
    written = write_shards(out, tensors, options.max_bytes)
    quantization = {"quantization_config": _quantization(set(tensors), kept)} if len(errors) > 1 else {}
    (out / "config.json").write_text(json.dumps(config | quantization, indent=1) + "\n", "utf-8")
    for file in {file for pattern in COPIED for file in source.glob(pattern) if file.is_file()}:
        shutil.copyfile(file, out / file.name)
    worst = max(errors, key=lambda name: errors[name])
    return Packed(
        num_matrices=len(errors) - 1,
        bytes_before=sum(file.stat().st_size for file in before),
        bytes_after=sum(file.stat().st_size for file in written),
        worst_error=errors[worst],
        worst_name=worst,
    )


def _tensors(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    yield name, opened.get_tensor(name)
        except SafetensorError as exc:
            raise ValueError(f"{file} is not a safetensors file: {exc}") from exc


def _is_packable(name: str, tensor: torch.Tensor, options: PackOptions) -> bool:
    if name.endswith((SCALE_SUFFIX, ZERO_POINT_SUFFIX)) or (options.keep and re.search(options.keep, name)):
        return False
    return tensor.dim() == 2 and tensor.dtype in FLOATS and tensor.numel() >= options.min_elements


def _quantised(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in bf16 where the weights are: finer ones would be lost when they are multiplied out."""
    try:
        return quantise_rows(tensor, torch.bfloat16 if tensor.dtype == torch.bfloat16 else torch.float32)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from exc


def _relative_error(weight: torch.Tensor, found: torch.Tensor) -> float:
    weight = weight.float()
    return float((found - weight).norm() / weight.norm().clamp_min(torch.finfo(torch.float32).tiny))


def _quantization(names: set[str], kept: Sequence[str]) -> dict[str, object]:
    """Targets are classes of modules: matrices that are bare parameters, as a selector's codebooks, belong to none.

    A tied head is a module without tensors of its own, and must not be taken for one in int8.
    """
    embedding = any(name.endswith(f"{_EMBEDDING}.weight{SCALE_SUFFIX}") for name in names)
    ignore = [name.removesuffix(".weight") for name in kept]
    if f"{_HEAD}.weight" not in names:
        ignore.append(_HEAD)
    return int8_config(["Linear", "Embedding"] if embedding else ["Linear"], sorted(ignore))


def main(argv: Sequence[str] | None = None) -> int:
    """Pack one folder and print what came of it; 1 and a line on stderr if it can't be done."""
    options = PackOptions()
    parser = argparse.ArgumentParser(prog="python -m memsvc.device.pack", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder, as trained")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    parser.add_argument("--max-bytes", type=int, default=options.max_bytes, help="largest file (default %(default)s)")
    parser.add_argument(
        "--min-elements", type=int, default=options.min_elements, help="smaller matrices stay (default %(default)s)"
    )
    parser.add_argument("--keep", default="", metavar="REGEX", help="matrices so named stay as they are")
    args = parser.parse_args(argv)
    try:
        chosen = PackOptions(max_bytes=args.max_bytes, min_elements=args.min_elements, keep=args.keep)
        packed = pack_folder(args.model, args.out, chosen)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{args.out}: {packed.num_matrices} matrices in int8, {packed.bytes_before} -> {packed.bytes_after} bytes,"
        f" worst relative error {packed.worst_error:.5f} ({packed.worst_name})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
