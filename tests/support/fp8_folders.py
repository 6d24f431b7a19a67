"""Checkpoints in fp8 made from tiny ones: with a scale a row as compressed-tensors has them, or a scale a block."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from memsvc.device.checkpoint import SINGLE_FILE
from memsvc.device.fp8 import E4M3, LARGEST
from memsvc.device.quant_config import BLOCK
from memsvc.device.scaled_weights import block_form, scaled
from target_worker.model.fp8_stacks import stack_of

_GATES = ("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")
"""Left as they are by those who publish such checkpoints."""

CHANNEL: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None,
                "block_structure": None, "dynamic": False, "observer": "minmax",
            },
            "input_activations": {
                "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True,
                "group_size": None, "observer": None,
            },
            "output_activations": None,
        }
    },
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
}  # fmt: skip
BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}

Stored = dict[str, torch.Tensor]
"""What is added to a matrix's name, and the tensor."""


def by_rows(weight: torch.Tensor) -> Stored:
    """Scales in bfloat16, and so large that no code is the largest: rounding once more would not give the same."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 300).bfloat16()
    return {"": (weight.float() / scales.float()).to(E4M3), "_scale": scales}


def by_blocks(weight: torch.Tensor) -> Stored:
    """Scales of blocks in float32, those at the ends cut off."""
    out, width = weight.shape
    rows, cols = block_form((out, width))
    padded = F.pad(weight.float(), (0, cols * BLOCK - width, 0, rows * BLOCK - out)).view(rows, BLOCK, cols, BLOCK)
    scales = padded.abs().amax((1, 3)).clamp_min(1e-12) / LARGEST
    codes = (padded / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST).view(rows * BLOCK, -1)[:out, :width]
    return {"": codes.to(E4M3).contiguous(), "_scale_inv": scales}


def make_fp8(source: Path, out: Path, store: Callable[[torch.Tensor], Stored], config: dict[str, Any]) -> Path:
    """source with its layers' matrices stored so, in out."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / SINGLE_FILE).items():
        is_matrix = stack_of(name) is not None and not name.endswith(_GATES)
        stored = store(tensor) if is_matrix else {"": tensor}
        tensors |= {name + suffix: part for suffix, part in stored.items()}
    return _write(source, out, tensors, {"quantization_config": config})


def make_floats(source: Path, out: Path) -> Path:
    """What a checkpoint in fp8 stands for, in float32."""
    stored = load_file(source / SINGLE_FILE)
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(("_scale", "_scale_inv"))}
    for name, tensor in tensors.items():
        if tensor.dtype == E4M3:
            scales = next(stored[name + suffix] for suffix in ("_scale", "_scale_inv") if name + suffix in stored)
            tensors[name] = scaled(tensor, scales, torch.float32)
    return _write(source, out, tensors, {"quantization_config": None})


def _write(source: Path, out: Path, tensors: dict[str, torch.Tensor], changes: dict[str, Any]) -> Path:
    out.mkdir()
    save_file(tensors, out / SINGLE_FILE)
    config = json.loads((source / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps(config))
    return out
