"""Reading a hybrid's folder: spellings, kinds, refusals, what is skipped and what is left over."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from target_worker.linear_memory import LinearMemory
from target_worker.model.config import TargetShape, kind_specs
from target_worker.model.linear_spec import LinearSpec, ring_page_rows
from target_worker.model.weights import load_target
from target_worker.runner import Runner
from tests.support.model_folders import HYBRID
from tests.support.tiny_hybrid import HybridRig, make_hybrid
from tests.support.tiny_target import tokens_of

TEXT = HYBRID["text_config"]


def shape_of(architecture: str = "Qwen3_5ForCausalLM", **changes: Any) -> TargetShape:
    return TargetShape.from_json({"architectures": [architecture], **TEXT, **changes}, {})


def nested(top: dict[str, Any], **text: Any) -> TargetShape:
    return TargetShape.from_json(HYBRID | top | {"text_config": TEXT | text}, {"eos_token_id": [7]})


def test_the_27b_geometry_takes_64_kib_a_token_and_a_state_of_3_2_mb_a_layer() -> None:
    kv, state, ring = kind_specs(shape_of(), 16, "auto", 9)
    assert (kv.name, kv.page_bytes, kv.tokens_per_page, kv.pages_per_req) == ("target_kv", 16 << 16, 16, 0)
    assert (state.name, state.page_bytes, state.tokens_per_page, state.pages_per_req) == ("state", 3_207_168, 0, 48)
    assert (ring.name, ring.page_bytes, ring.tokens_per_page, ring.pages_per_req) == ("ring", 17 * 20_864, 0, 96)
    assert ring_page_rows(16, 9) == 17
    assert kind_specs(shape_of(), 16, "float32", 9)[1].page_bytes == 48 * 128 * 128 * 4 + 3 * 10_240 * 4
    half = kind_specs(shape_of(), 16, "auto", 9, state_dtype="bfloat16")
    assert [kind.page_bytes for kind in half] == [kv.page_bytes, 48 * 128 * 128 * 2 + 3 * 10_240 * 2, ring.page_bytes]


def test_both_spellings_say_the_same() -> None:
    flat, inner = shape_of(), nested({})
    assert inner.eos_ids == (7, 248044)
    assert (
        flat.linear == inner.linear == LinearSpec(num_k_heads=16, num_v_heads=48, k_dim=128, v_dim=128, conv_kernel=4)
    )
    assert flat.layer_types == inner.layer_types == (*["linear_attention"] * 3, "full_attention") * 16
    assert (inner.num_layers, inner.num_full_layers, inner.num_linear_layers) == (64, 16, 48)
    assert inner.stored_dtype == "bfloat16"
    assert inner.rope.rotary_dim == 64
    assert inner.max_positions == 262144


def test_rotary_covers_a_quarter_where_nothing_is_said() -> None:
    assert shape_of(rope_parameters={"rope_type": "default", "rope_theta": 1e7}).rope.rotary_dim == 64
    assert shape_of(rope_parameters=None, partial_rotary_factor=0.5, rope_theta=1e6).rope.rotary_dim == 128


def test_the_outer_word_about_the_head_counts() -> None:
    assert nested({"tie_word_embeddings": True}).tie_word_embeddings
    assert not nested({"tie_word_embeddings": False}, tie_word_embeddings=True).tie_word_embeddings
    inner = {"architectures": HYBRID["architectures"], "text_config": TEXT | {"tie_word_embeddings": True}}
    assert TargetShape.from_json(inner, {}).tie_word_embeddings


def test_a_hybrid_whose_layers_are_all_full_has_no_states() -> None:
    shape = shape_of(full_attention_interval=1)
    assert shape.linear is None
    assert [kind.name for kind in kind_specs(shape, 16, "auto")] == ["target_kv"]


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Qwen3_5MoeForCausalLM", {}, "Qwen3_5MoeForCausalLM'] is a mixture of experts"),
        ("Qwen3_5ForCausalLM", {"num_experts": 8}, "num_experts is 8; mixtures"),
        ("Qwen3NextForCausalLM", {}, "num_experts is 512; mixtures"),
        ("Qwen3_5ForCausalLM", {"attn_output_gate": False}, "attn_output_gate is false"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["full_attention"] * 3}, "names 3 layers, num_hidden_layers is 64"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["mamba"] * 64}, r"layer_types \['mamba'\] is not supported"),
        ("Qwen3ForCausalLM", {"layer_types": ["linear_attention"] * 64}, "must all be full_attention"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["linear_attention"] * 64}, "none of 64 layers is full_attention"),
        ("Qwen3_5ForCausalLM", {"layer_types": "full_attention"}, "must be a list of names, got 'full_attention'"),
        ("Qwen3_5ForCausalLM", {"layer_types": 64}, "must be a list of names, got 64"),
        ("Qwen3_5ForCausalLM", {"text_config": [TEXT]}, r"text_config must be an object, got \[\{"),
        (
            "Qwen3_5ForCausalLM",
            {"rope_parameters": {"partial_rotary_factor": 2}},
            "512 rotary dimensions of a head of 256",
        ),
        ("Qwen3_5ForCausalLM", {"linear_num_value_heads": 40}, "40 linear value heads .* multiple of 16"),
        ("Qwen3_5ForCausalLM", {"linear_conv_kernel_dim": 1}, "must be at least 2"),
        ("Qwen3_5ForCausalLM", {"linear_key_head_dim": None}, "lacks linear_key_head_dim"),
        ("Qwen3_5ForCausalLM", {"quantization_config": {"bits": 4}}, "quantization_config: quant_method"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of(architecture, **changes)


def test_the_vision_tower_and_the_head_for_several_tokens_are_skipped_and_nothing_else(tmp_path: Path) -> None:
    make_hybrid(tmp_path)
    file = tmp_path / "model.safetensors"
    good = load_file(file)

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, file)
        with pytest.raises(ValueError, match=message):
            load_target(tmp_path)

    ones = torch.ones(3)
    save_file(good | {"mtp.fc.weight": ones, "model.visual.blocks.0.attn.qkv.weight": ones.clone()}, file)
    load_target(tmp_path)
    refused(good | {"model.visionary.weight": ones}, "1 tensors .*visionary")
    refused(good | {"model.layers.0.linear_attn.conv1d.bias": ones}, "1 tensors .*conv1d.bias")
    name = "model.layers.1.linear_attn.A_log"
    refused({key: value for key, value in good.items() if key != name}, f"no tensor {name}")
    refused(good | {name: ones}, rf"{name} in model.safetensors is \[3\], the config asks for \[4\]")


def test_dummy_weights_need_no_files_and_give_sane_logits(tmp_path: Path) -> None:
    make_hybrid(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model, shape = load_target(tmp_path, load_format="dummy")
    assert len(model.delta_layers) == shape.num_linear_layers == 3
    tokens = torch.arange(9)
    got = model.hidden(
        tokens,
        tokens,
        attend=lambda i, q, k, v: q.flatten(1),
        recur=lambda i, conv, rows: rows.raw[:, 64:].unflatten(1, (4, 8)).float(),
    )
    assert model.logits(got).isfinite().all()


def test_a_runner_needs_the_states_of_exactly_the_linear_layers(tmp_path: Path) -> None:
    make_hybrid(tmp_path, num_hidden_layers=4)
    rig = HybridRig(tmp_path)
    with pytest.raises(ValueError, match="states of 0 layers for a target with 3"):
        Runner(rig.model, rig.runner.pool, rig.tables)
    with pytest.raises(ValueError, match=r"needs the kinds \['ring'\], the pool has \['state', 'target_kv'\]"):
        LinearMemory.of_layout(
            rig.arena,
            structs.replace(rig.layout, kinds=rig.layout.kinds[:2]),
            rig.model,
            max_reqs=2,
            block_size=rig.block,
        )
    with pytest.raises(ValueError, match="kind ring has pages of"):
        LinearMemory.of_layout(rig.arena, rig.layout, rig.model, max_reqs=2, block_size=rig.block + 1)
    req = rig.open(1, 8)
    assert rig.runner.forward([rig.segment(req, tokens_of(1, 3), certain=3, logits=0)]).shape == (0, 97)
