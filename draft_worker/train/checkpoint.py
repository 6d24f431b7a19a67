"""Files of a training run: its state, to go on later, and the drafter in the layout that serving loads."""

import json
from pathlib import Path
from typing import Any

import torch

from draft_worker.shape import DraftShape
from draft_worker.train.drafter import Tensors, parameter_sizes
from memsvc.device.checkpoint import CheckpointReader
from memsvc.device.shards import FILE_BYTES, write_shards


def write_drafter(
    folder: Path, config: dict[str, Any], tensors: Tensors, draft_to_target: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """config.json and safetensors in folder, in shards if one file would pass FILE_BYTES. Old weights are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    if draft_to_target is not None:
        whole["d2t"] = draft_to_target.cpu() - torch.arange(len(draft_to_target))
    write_shards(folder, whole, FILE_BYTES)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def read_drafter(folder: Path, shape: DraftShape) -> dict[str, torch.Tensor]:
    """float32 parameters of a drafter of that shape, to start from. Raises ValueError naming what does not fit.

    Convolutions and selector may be missing, as in a DFlash drafter: they are left out of the result.
    """
    with CheckpointReader(folder) as reader:
        found = {
            name: reader.get(name, size, torch.float32).clone()
            for name, size in parameter_sizes(shape).items()
            if reader.has(name) or not ("_conv." in name or name.startswith("candidate_selector."))
        }
    return found
