"""The state of a training run, to go on later: parameters, moments and facts."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from memsvc.device.hf_config import read_json
from target_worker.train.optimizer import Optimizer

STATE_TENSORS, STATE_FACTS = "state.safetensors", "state.json"

Tensors = Mapping[str, torch.Tensor]


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
            raise ValueError(f"{folder} holds no {min(missing)}: it is of another model or optimiser")
        for name, tensor in tensors.items():
            found = opened.get_tensor(f"param.{name}")
            if found.shape != tensor.shape:
                raise ValueError(f"{folder}: {name} is {list(found.shape)}, the model has {list(tensor.shape)}")
            tensor.data.copy_(found)
        optimizer.restore({name: opened.get_tensor(name) for name in optimizer.moment_names()}, progress.step)
    return progress


def facts_of(progress: Progress, **parts: Any) -> dict[str, Any]:
    """What a state says of itself."""
    return {"progress": asdict(progress)} | parts
