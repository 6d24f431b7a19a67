"""The published tensor layout, name by name: what a folder must hold, and that it drafts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_worker.config import DraftConfig
from draft_worker.shape import DraftShape
from draft_worker.weights import load_model
from tests.support.draft_rig import DraftRig
from tests.support.make_drafter import V1, V2, drafter_config, drafter_sizes, make_target_stub, write_folder

H, HEADS, KV_HEADS, D, WIDTH, TAPS, V = 48, 6, 2, 8, 96, 3, 211
"""Sizes of the stub target and of the drafters made for it."""
TAP, GROUP, RANK = 2, 16, 32

V1_WHOLE = {"fc.weight": (H, TAPS * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
V1_LAYER = {
    "input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,),
    "self_attn.q_proj.weight": (HEADS * D, H), "self_attn.k_proj.weight": (KV_HEADS * D, H),
    "self_attn.v_proj.weight": (KV_HEADS * D, H), "self_attn.o_proj.weight": (H, HEADS * D),
    "self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,),
    "mlp.gate_proj.weight": (WIDTH, H), "mlp.up_proj.weight": (WIDTH, H), "mlp.down_proj.weight": (H, WIDTH),
}  # fmt: skip
V2_WHOLE = {
    "candidate_selector.hidden_projection.weight": (RANK, H),
    "candidate_selector.predecessor_codebook": (V, RANK), "candidate_selector.successor_codebook": (V, RANK),
}  # fmt: skip
V2_LAYER = {
    f"{part}_conv.{name}": size
    for part in ("attention", "mlp")
    for name, size in {
        "base_kernel": (2, TAP, H),
        "kernel_projection.weight": (2 * TAP * (H // GROUP), H),
    }.items()
}


def published(version: int, num_layers: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, written down from the layout and from nothing of this project."""
    whole, layer = dict(V1_WHOLE), dict(V1_LAYER)
    if version == V2:
        whole, layer = whole | V2_WHOLE, layer | V2_LAYER
    layers = {f"layers.{i}.{name}": size for i in range(num_layers) for name, size in layer.items()}
    return whole | layers


def write(folder: Path, target: Path, version: int, num_layers: int) -> Path:
    """A drafter of that layout, its weights random."""
    overrides = {"layer_types": ["sliding_attention"] * num_layers} if version == V2 else {}
    raw = json.loads((target / "config.json").read_text())
    config = drafter_config(raw, version, num_hidden_layers=num_layers, **overrides)
    generator = torch.Generator().manual_seed(version)
    sizes = published(version, num_layers)
    tensors = {name: 0.1 * torch.randn(size, generator=generator) for name, size in sizes.items()}
    return write_folder(folder, config, tensors)


def load(drafter: Path, target: Path) -> None:
    config = DraftConfig(run_dir="", draft_path=str(drafter), target_path=str(target), dtype="float32")
    load_model(config, DraftShape.from_folder(drafter))


@pytest.mark.parametrize(("version", "count"), [(V1, 58), (V2, 81)])
def test_a_folder_of_five_layers_in_the_published_layout_loads(version: int, count: int, tmp_path: Path):
    target = make_target_stub(tmp_path / "target")
    drafter = write(tmp_path / "drafter", target, version, 5)
    assert len(load_file(drafter / "model.safetensors")) == count
    load(drafter, target)


@pytest.mark.parametrize("version", [V1, V2])
def test_a_folder_of_that_layout_drafts_what_the_formulas_say(version: int, tmp_path: Path):
    layers = {"layer_types": ["sliding_attention"] * 5} if version == V2 else {}
    rig = DraftRig(tmp_path, version, num_hidden_layers=5, **layers)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == published(version, 5)
    assert drafter_sizes(config) == published(version, 5)
    for rid, context_len in enumerate([19, 6]):
        rig.open(rid, context_len)
    assert rig.propose([0, 1], 7) == [rig.expected(rid, 7) for rid in (0, 1)]


@pytest.mark.parametrize("version", [V1, V2])
def test_each_tensor_that_is_missing_is_named(version: int, tmp_path: Path):
    target = make_target_stub(tmp_path / "target")
    drafter = write(tmp_path / "drafter", target, version, 2)
    tensors = load_file(drafter / "model.safetensors")
    for name in published(version, 2):
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, drafter / "model.safetensors")
        with pytest.raises(ValueError, match=f"no tensor {name} "):
            load(drafter, target)


@pytest.mark.parametrize(
    "name",
    ["fc.bias", "layers.2.input_layernorm.weight", "layers.0.self_attn.rotary.scale", "encoder.layers.0.fc.weight",
     "layers.0.attention_conv.base_kernel", "t2d.weight"],
)  # fmt: skip
def test_a_tensor_that_is_not_of_the_layout_is_named(name: str, tmp_path: Path):
    target = make_target_stub(tmp_path / "target")
    drafter = write(tmp_path / "drafter", target, V1, 2)
    tensors = load_file(drafter / "model.safetensors")
    save_file(tensors | {name: torch.zeros(3)}, drafter / "model.safetensors")
    with pytest.raises(ValueError, match=f"1 tensors that config.json does not account for: {name}"):
        load(drafter, target)
