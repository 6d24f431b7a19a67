"""Every spelling of config.json that drafters come in."""

import json
from typing import Any

import pytest

from draft_worker.config import DraftConfig, kind_specs, resolve_dtype
from draft_worker.shape import DraftShape
from memsvc.device.quant_config import int8_config

SLIDING, FULL = "sliding_attention", "full_attention"


def config(**changes: Any) -> dict[str, Any]:
    """A v1 config at the size of a published one; dflash_config keys by the prefix `flash_`."""
    made: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "num_target_layers": 36,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    }
    for key, value in changes.items():
        home = made["dflash_config"] if key.startswith("flash_") else made
        home[key.removeprefix("flash_")] = value
    return made


V2 = {
    "architectures": ["DFlash2DraftModel"],
    "flash_conv_kernel_size": 2,
    "flash_conv_group_size": 16,
    "flash_selector_rank": 256,
    "flash_selector_top_k": 16,
}


def test_a_published_v1_config_is_read_in_full():
    shape = DraftShape.from_json(config())
    assert (shape.hidden_size, shape.num_layers, shape.block_size, shape.mask_token_id) == (4096, 5, 16, 151669)
    assert shape.target_layer_ids == (1, 9, 17, 25, 33)
    assert shape.feature_width == 5 * 4096
    assert [(layer.window, layer.causal) for layer in shape.layers] == [(0, False)] * 5
    assert (shape.has_conv, shape.has_selector, shape.window) == (False, False, 0)
    assert shape.rope.theta == 1e6
    assert shape.is_neox


def test_weights_in_int8_change_nothing_of_the_shape():
    assert DraftShape.from_json(config(quantization_config=int8_config(["Linear"], []))) == DraftShape.from_json(
        config()
    )


def test_a_published_v2_config_is_read_in_full():
    raw = config(
        **V2,
        hidden_size=5120,
        block_size=None,
        flash_block_size=8,
        layer_types=[SLIDING] * 5,
        sliding_window=2048,
        is_causal=False,
        rope_theta=None,
        rope_parameters={"rope_theta": 10000000, "rope_type": "default"},
    )
    shape = DraftShape.from_json(raw)
    assert (shape.block_size, shape.window, shape.selector_rank, shape.conv_group_size) == (8, 2048, 256, 16)
    assert all((layer.window, layer.causal) == (2048, False) for layer in shape.layers)
    assert shape.rope.theta == 1e7


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({}, [True, False]),
        ({"is_causal": False}, [False, False]),
        ({"is_causal": True}, [True, True]),
        ({"flash_causal": False}, [False, False]),
        ({"flash_causal": True, "is_causal": False}, [False, False]),
        ({"sliding_window_non_causal": True}, [False, False]),
    ],
)
def test_causality_is_resolved_top_level_then_nested_then_by_layer_type(changes, causal):
    raw = config(num_hidden_layers=2, layer_types=[SLIDING, FULL], sliding_window=64, **changes)
    shape = DraftShape.from_json(raw)
    assert [layer.causal for layer in shape.layers] == causal
    assert [layer.window for layer in shape.layers] == [64, 0]
    assert shape.window == 0, "one full layer keeps the whole context"


def test_the_older_spelling_of_the_window_makes_every_layer_slide():
    shape = DraftShape.from_json(config(flash_use_swa=True, flash_swa_window_size=512, flash_causal=False))
    assert {(layer.window, layer.causal) for layer in shape.layers} == {(512, False)}


def test_nested_keys_win_over_top_level_ones():
    shape = DraftShape.from_json(config(flash_block_size=8, flash_output_multiplier=0.5, output_multiplier=2.0))
    assert (shape.block_size, shape.output_multiplier) == (8, 0.5)


@pytest.mark.parametrize("home", ["", "flash_"])
def test_scalars_and_flags_are_found_in_both_homes(home):
    changes = {
        "input_embedding_scale": 3.0,
        "output_multiplier": 0.25,
        "final_logit_softcapping": 20.0,
        "attention_sink_bias": True,
        "attention_value_scale": 0.707,
    }
    shape = DraftShape.from_json(config(**{home + key: value for key, value in changes.items()}))
    assert {key: getattr(shape, key) for key in changes} == changes


def test_missing_taps_are_spread_over_the_target():
    raw = config(num_target_layers=36)
    del raw["dflash_config"]["target_layer_ids"]
    assert DraftShape.from_json(raw).target_layer_ids == (1, 9, 17, 25, 33)
    raw["num_hidden_layers"] = 1
    assert DraftShape.from_json(raw).target_layer_ids == (18,)
    raw["num_target_layers"] = None
    with pytest.raises(ValueError, match="num_target_layers"):
        DraftShape.from_json(raw)


def test_a_speculators_config_counts_hidden_states_and_nests_the_layer_stack():
    plain = config()
    stack = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_theta")  # fmt: skip
    raw = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {key: plain[key] for key in stack} | {"model_type": "qwen3"},
        "draft_vocab_size": 32000,
        "block_size": 8,
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "mask_token_id": 151669,
        "projector_type": "dflash",
        "sliding_window_non_causal": False,
    }
    shape = DraftShape.from_json(raw)
    assert shape.target_layer_ids == (1, 9, 17, 25, 33)
    assert (shape.draft_vocab_size, shape.block_size, shape.hidden_size) == (32000, 8, 4096)


def test_rope_scaling_partial_rotation_and_neighbour_pairs_are_read():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    shape = DraftShape.from_json(config(rope_scaling=scaling, partial_rotary_factor=0.5, rope_is_neox_style=False))
    assert (shape.rope.rope_type, shape.rope.factor, shape.rope.rotary_dim) == ("yarn", 4.0, 64)
    assert not shape.is_neox
    by_type = {SLIDING: {"rope_theta": 5e5, "rope_type": "default"}, FULL: {"rope_theta": 5e5, "rope_type": "default"}}
    assert DraftShape.from_json(config(rope_parameters=by_type)).rope.theta == 5e5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Eagle3Draft"]}, "architectures"),
        ({"flash_sample_from_anchor": True}, "sample_from_anchor"),
        ({"flash_projector_type": "dspark"}, "projector_type 'dspark'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quant_method is None"),
        (
            {"quantization_config": int8_config(["Linear"], []) | {"kv_cache_scheme": {"num_bits": 8}}},
            "kv_cache_scheme",
        ),
        ({"flash_conv_kernel_size": 2}, "conv_group_size is 0: both or neither"),
        ({"flash_selector_top_k": 16}, "both or neither"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel needs"),
        (V2 | {"flash_conv_group_size": 24}, "4096 is not a multiple of conv_group_size 24"),
        ({"layer_types": [SLIDING] * 4}, "each of 5 layers"),
        ({"layer_types": ["linear_attention"] * 5}, "linear_attention"),
        ({"layer_types": [SLIDING] * 5}, "sliding_window is missing"),
        ({"flash_target_layer_ids": [1, 36]}, "36 is not a layer"),
        ({"flash_target_layer_ids": []}, "target_layer_ids"),
        ({"flash_mask_token_id": 151936}, "mask_token_id 151936"),
        ({"block_size": 1}, "block_size is 1"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"num_key_value_heads": 5}, "32 is not a multiple of num_key_value_heads 5"),
        ({"is_causal": "no"}, "is_causal"),
        ({"output_multiplier": 0.0}, "output_multiplier 0.0"),
        ({"draft_vocab_size": 151937}, "exceeds vocab_size"),
        ({"rope_parameters": {SLIDING: {"rope_theta": 1.0}, FULL: {"rope_theta": 2.0}}}, "differ"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        DraftShape.from_json(config(**changes))


def test_a_folder_without_a_usable_config_is_refused_with_its_path(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        DraftShape.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config(block_size=0)))
    with pytest.raises(ValueError, match=r"config.json: block_size is 0"):
        DraftShape.from_folder(tmp_path)


def test_the_kind_holds_all_layers_and_the_window_only_if_all_slide():
    shape = DraftShape.from_json(config())
    (kind,) = kind_specs(shape, 16, "bfloat16")
    assert (kind.name, kind.page_bytes, kind.tokens_per_page, kind.window) == ("draft_kv", 16 * 20 * 1024, 16, 0)
    sliding = DraftShape.from_json(config(layer_types=[SLIDING] * 5, sliding_window=2048))
    assert kind_specs(sliding, 16, "float32")[0].window == 2048
    assert kind_specs(sliding, 16, "float32")[0].page_bytes == 2 * kind.page_bytes
    assert 2 * kind_specs(shape, 16, "bfloat16", "fp8_e4m3")[0].page_bytes == kind.page_bytes


@pytest.mark.parametrize(
    ("stored", "served"),
    [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "bfloat16"), (None, "bfloat16")],
)
def test_auto_dtype_is_the_checkpoints_unless_that_overflows(stored, served):
    shape = DraftShape.from_json(config(torch_dtype=stored))
    assert resolve_dtype("auto", shape) == served
    assert resolve_dtype("float32", shape) == "float32"


def test_the_process_config_refuses_flags_with_their_values():
    shape = DraftShape.from_json(config())
    base = {"run_dir": "r", "draft_path": "d", "target_path": "t"}
    assert DraftConfig(**base).drafts_per_block(shape) == 15
    assert DraftConfig(**base, num_draft_tokens=7).drafts_per_block(shape) == 7
    with pytest.raises(ValueError, match="16 drafts a block are asked for, the drafter was trained for 15"):
        DraftConfig(**base, num_draft_tokens=16).drafts_per_block(shape)
    for wrong in ({"propose_route": "fast"}, {"dtype": "float16"}, {"load_format": "pt"}, {"context_len": 0}):
        with pytest.raises(ValueError, match="--"):
            DraftConfig(**base, **wrong)
