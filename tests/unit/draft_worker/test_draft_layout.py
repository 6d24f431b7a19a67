"""The published tensor layout, name by name: what a folder must hold, and that it drafts."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_worker.borrowed import Borrowed
from draft_worker.config import DraftConfig
from draft_worker.shape import DraftShape
from draft_worker.tensors import DraftTensors
from draft_worker.weights import _build, load_model
from tests.support.draft_rig import DraftRig
from tests.support.make_drafter import V1, V2, drafter_config, drafter_sizes, make_target_stub, write_folder
from tests.support.meta_source import MetaSource


class Sizes(NamedTuple):
    """What the shapes of a drafter's tensors are made of, in the letters of the formulas."""

    h: int
    heads: int
    kv_heads: int
    d: int
    width: int
    taps: int
    """Target layers whose outputs are read."""
    v: int
    tap: int
    """Rows that a convolution sees."""
    group: int
    rank: int


SMALL = Sizes(h=48, heads=6, kv_heads=2, d=8, width=96, taps=3, v=211, tap=2, group=16, rank=32)
"""Of the stub target and of the drafters made for it."""
FULL = Sizes(h=5120, heads=32, kv_heads=8, d=128, width=17408, taps=5, v=248320, tap=2, group=16, rank=256)
"""Of Qwen3.8-27B-DFlash2."""
FULL_CONFIG = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_size": 5120,
    "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 248320, "attention_bias": False,
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "num_target_layers": 64, "is_causal": False,
    "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "use_sliding_window": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "dflash_config": {
        "block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 248070, "selector_rank": 256,
        "selector_top_k": 16, "target_layer_ids": [5, 19, 33, 47, 61],
    },
}  # fmt: skip


def whole_tensors(version: int, s: Sizes) -> dict[str, tuple[int, ...]]:
    v1 = {"fc.weight": (s.h, s.taps * s.h), "hidden_norm.weight": (s.h,), "norm.weight": (s.h,)}
    v2 = {
        "candidate_selector.hidden_projection.weight": (s.rank, s.h),
        "candidate_selector.predecessor_codebook": (s.v, s.rank),
        "candidate_selector.successor_codebook": (s.v, s.rank),
    }
    return v1 | v2 if version == V2 else v1


def layer_tensors(version: int, s: Sizes) -> dict[str, tuple[int, ...]]:
    q_rows, kv_rows = s.heads * s.d, s.kv_heads * s.d
    v1 = {
        "input_layernorm.weight": (s.h,), "post_attention_layernorm.weight": (s.h,),
        "self_attn.q_proj.weight": (q_rows, s.h), "self_attn.k_proj.weight": (kv_rows, s.h),
        "self_attn.v_proj.weight": (kv_rows, s.h), "self_attn.o_proj.weight": (s.h, q_rows),
        "self_attn.q_norm.weight": (s.d,), "self_attn.k_norm.weight": (s.d,),
        "mlp.gate_proj.weight": (s.width, s.h), "mlp.up_proj.weight": (s.width, s.h),
        "mlp.down_proj.weight": (s.h, s.width),
    }  # fmt: skip
    v2 = {
        f"{part}_conv.{name}": size
        for part in ("attention", "mlp")
        for name, size in {
            "base_kernel": (2, s.tap, s.h),
            "kernel_projection.weight": (2 * s.tap * (s.h // s.group), s.h),
        }.items()
    }
    return v1 | v2 if version == V2 else v1


def published(version: int, num_layers: int, sizes: Sizes = SMALL) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, written down from the layout and from nothing of this project."""
    layer = layer_tensors(version, sizes)
    layers = {f"layers.{i}.{name}": size for i in range(num_layers) for name, size in layer.items()}
    return whole_tensors(version, sizes) | layers


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


def build_full(sizes: dict[str, tuple[int, ...]]) -> MetaSource:
    """Qwen3.8-27B-DFlash2 built from a checkpoint of those sizes, without numbers."""
    source, shape = MetaSource(sizes), DraftShape.from_json(FULL_CONFIG)
    tensors = DraftTensors(source, torch.bfloat16, has_files=True)
    matrix = torch.empty((FULL.v, FULL.h), dtype=torch.bfloat16, device="meta")
    config = DraftConfig(run_dir="", draft_path="nowhere", target_path="nowhere", dtype="bfloat16", device="meta")
    model = _build(config, shape, tensors, Borrowed(matrix, matrix))
    tensors.refuse_leftovers()
    assert (len(model.layers), model.mask_row.shape) == (5, (FULL.h,))
    return source


def test_of_full_size_the_loader_wants_what_is_published_and_nothing_else():
    sizes = published(V2, 5, FULL)
    assert drafter_sizes(FULL_CONFIG) == sizes
    assert sizes["layers.4.mlp_conv.kernel_projection.weight"] == (1280, 5120)
    assert sizes["fc.weight"] == (5120, 25600)
    num_parameters = sum(math.prod(size) for size in sizes.values())
    assert (len(sizes), num_parameters, 2 * num_parameters) == (81, 1_924_404_480, 3_848_808_960)
    assert build_full(sizes).unused() == []
    with pytest.raises(ValueError, match=r"1 tensors .* does not account for: layers\.5\.norm\.weight$"):
        build_full(sizes | {"layers.5.norm.weight": (5120,)})


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


def test_many_tensors_that_are_not_of_the_layout_are_named_in_part_and_counted(tmp_path: Path):
    target = make_target_stub(tmp_path / "target")
    drafter = write(tmp_path / "drafter", target, V1, 2)
    stray = {f"x.{i}": torch.zeros(3) for i in range(9)}
    save_file(load_file(drafter / "model.safetensors") | stray, drafter / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"9 tensors that config.json does not account for: x\.0, .*, x\.7 and 1 more$"
    ):
        load(drafter, target)
