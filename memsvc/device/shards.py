"""Writes a folder's safetensors, in one file or in several with an index."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from memsvc.device.checkpoint import INDEX_FILE, SINGLE_FILE

FILE_BYTES = 15 << 20
"""Largest file that is written if nobody says otherwise: some ways of moving files stop at 16 MiB."""
_ENTRY_BYTES = 128
"""At most what a header says of one tensor, its name apart."""
_FRAME_BYTES = 256
"""The rest of a header."""


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], max_bytes: int) -> list[Path]:
    """Write the tensors, in their order, into files of at most max_bytes each; a larger tensor has a file of its own.

    One file is named SINGLE_FILE; several are numbered and named by INDEX_FILE. Returns the files of weights. What
    an earlier call left in the folder is removed first.
    """
    for old in [*folder.glob("model*.safetensors"), folder / INDEX_FILE]:
        old.unlink(missing_ok=True)
    shards = _split(tensors, max_bytes)
    names = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    return [folder / file for file in names]


def _split(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = _FRAME_BYTES
    for name, tensor in tensors.items():
        cost = tensor.nbytes + len(name) + _ENTRY_BYTES
        if shards[-1] and size + cost > max_bytes:
            shards.append({})
            size = _FRAME_BYTES
        shards[-1][name] = tensor
        size += cost
    return shards
