"""Files of a training run: its state, to go on later, and the drafter in the layout that serving loads."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draft_worker.shape import DraftShape
from draft_worker.train.drafter import Tensors, parameter_sizes
from draft_worker.train.optimizer import Optimizer
from memsvc.device.checkpoint import INDEX_FILE, SINGLE_FILE, CheckpointReader
from memsvc.device.hf_config import read_json

SHARD_BYTES = 16_600_000
"""Largest file of weights: some ways of moving files stop at 16 MiB."""
STATE_TENSORS, STATE_FACTS = "state.safetensors", "state.json"


@dataclass(slots=True)
class Progress:
    """Where a run stands, beside its tensors."""

    step: int = 0
    """Optimiser steps done."""
    total_steps: int = 0
    """Steps in all; 0 = not known yet."""
    seconds: float = 0.0
    """Training time of all slices."""
    tokens: int = 0
    """Tokens read, padding included."""


def write_drafter(
    folder: Path, config: dict[str, Any], tensors: Tensors, draft_to_target: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """config.json and safetensors in folder, in shards if one file would pass SHARD_BYTES. Old weights are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("model*.safetensors"), folder / INDEX_FILE]:
        old.unlink(missing_ok=True)
    whole = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    if draft_to_target is not None:
        whole["d2t"] = draft_to_target.cpu() - torch.arange(len(draft_to_target))
    shards = _shards(whole)
    names = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(tensor.nbytes for tensor in whole.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def _shards(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


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


def save_state(folder: Path, tensors: Tensors, optimizer: Optimizer, facts: dict[str, Any]) -> None:
    """Parameters, moments and facts. A crash while writing leaves the state that was there before."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {f"param.{name}": tensor.detach() for name, tensor in tensors.items()} | optimizer.moments()
    step = int(facts["progress"]["step"])
    save_file({name: tensor.cpu() for name, tensor in whole.items()}, folder / f"{step}-{STATE_TENSORS}")
    waiting = folder / f"{STATE_FACTS}.new"
    waiting.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    os.replace(waiting, folder / STATE_FACTS)
    for old in folder.glob(f"*-{STATE_TENSORS}"):
        if old.name != f"{step}-{STATE_TENSORS}":
            old.unlink()


def has_state(folder: Path) -> bool:
    """A run can go on from there."""
    return (folder / STATE_FACTS).is_file()


def read_facts(folder: Path) -> dict[str, Any]:
    """What save_state was given."""
    return read_json(folder / STATE_FACTS)


def load_state(folder: Path, tensors: Tensors, optimizer: Optimizer) -> Progress:
    """Put a saved state into parameters and optimiser. Raises ValueError if a tensor is missing or shaped otherwise."""
    progress = Progress(**read_facts(folder)["progress"])
    with safe_open(str(folder / f"{progress.step}-{STATE_TENSORS}"), framework="pt") as opened:
        missing = {*optimizer.moment_names(), *(f"param.{name}" for name in tensors)} - set(opened.keys())
        if missing:
            raise ValueError(f"{folder} holds no {min(missing)}: it is of another drafter or optimiser")
        for name, tensor in tensors.items():
            found = opened.get_tensor(f"param.{name}")
            if found.shape != tensor.shape:
                raise ValueError(f"{folder}: {name} is {list(found.shape)}, the drafter has {list(tensor.shape)}")
            tensor.data.copy_(found)
        optimizer.restore({name: opened.get_tensor(name) for name in optimizer.moment_names()}, progress.step)
    return progress


def facts_of(progress: Progress, **parts: Any) -> dict[str, Any]:
    """What a state says of itself."""
    return {"progress": asdict(progress)} | parts
