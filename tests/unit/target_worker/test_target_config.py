"""Reading a target's folder: defaults, refusals, kinds and the fingerprint."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from memsvc.device.hf_config import rope_spec
from memsvc.device.quant_config import int8_config
from target_worker.model.config import TargetShape, kind_specs
from target_worker.model.weights import load_target
from tests.support.tiny_target import make_target

SMOL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def shape_of(**changes: Any) -> TargetShape:
    return TargetShape.from_json(SMOL | changes, {})


def test_smollm2_takes_23040_bytes_a_token_in_bfloat16() -> None:
    (spec,) = kind_specs(shape_of(), 16, "auto")
    assert (spec.name, spec.page_bytes, spec.tokens_per_page) == ("target_kv", 16 * 23040, 16)
    assert kind_specs(shape_of(), 1, "float32")[0].page_bytes == 46080


def test_weights_in_int8_change_nothing_of_the_shape() -> None:
    assert shape_of(quantization_config=int8_config(["Linear"], ["lm_head"])) == shape_of()
    assert shape_of(quantization_config=None) == shape_of()


def test_eos_ids_come_from_both_files() -> None:
    shape = TargetShape.from_json(SMOL | {"eos_token_id": [7, 2]}, {"eos_token_id": [2, 0]})
    assert shape.eos_ids == (0, 2, 7)
    assert TargetShape.from_json(SMOL | {"eos_token_id": None}, {}).eos_ids == ()


def test_biases_and_norms_follow_the_family() -> None:
    def flags(name: str, **changes: Any) -> tuple[bool, bool, bool, bool]:
        shape = shape_of(architectures=[name], **changes)
        return shape.qkv_bias, shape.o_bias, shape.mlp_bias, shape.qk_norm

    assert flags("LlamaForCausalLM") == (False, False, False, False)
    assert flags("LlamaForCausalLM", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags("Qwen2ForCausalLM") == (True, False, False, False)
    assert flags("Qwen3ForCausalLM") == (False, False, False, True)
    assert flags("Qwen3ForCausalLM", attention_bias=True) == (True, True, False, True)
    assert shape_of(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert shape_of(head_dim=None).head_dim == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"MambaForCausalLM.*supported are LlamaForCausalLM"),
        ({"architectures": None}, r"\[\] is not supported"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers must be a positive whole number, got '30'"),
        ({"num_key_value_heads": 2}, "9 query heads are not a multiple of 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quant_method is None"),
        ({"quantization_config": int8_config(["Linear"], []) | {"format": "pack-quantized"}}, "'pack-quantized'"),
        ({"use_sliding_window": True, "sliding_window": 1024}, "sliding_window 1024"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "below 1"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be token ids"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of(**changes)


def test_an_idle_sliding_window_is_no_reason_to_refuse() -> None:
    shape_of(use_sliding_window=False, sliding_window=1024)
    shape_of(use_sliding_window=True, sliding_window=1024, max_window_layers=30)
    shape_of(use_sliding_window=True, sliding_window=1024, layer_types=["full_attention"] * 30)


def test_both_rope_spellings_mean_the_same() -> None:
    numbers = {"factor": 4.0, "original_max_position_embeddings": 2048}
    old = rope_spec(SMOL | {"rope_scaling": {"type": "yarn", **numbers}}, 64)
    new = rope_spec(
        {k: v for k, v in SMOL.items() if k != "rope_theta"}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100000, **numbers}},
        64,
    )
    assert old == new
    assert old.theta == 100000
    assert rope_spec(SMOL | {"partial_rotary_factor": 0.5}, 64).rotary_dim == 32


def test_the_context_grows_with_rope_only_where_the_model_says_so() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert shape_of().max_positions == 8192
    assert shape_of(rope_scaling=yarn).max_positions == 16384
    assert shape_of(rope_scaling={"type": "dynamic", "factor": 4.0}).max_positions == 8192
    assert shape_of(rope_scaling={"type": "linear", "factor": 4.0}).max_positions == 32768


def test_auto_is_the_stored_dtype_and_others_are_checked() -> None:
    assert shape_of().resolve_dtype("auto") == "bfloat16"
    assert shape_of(dtype="float32").resolve_dtype("auto") == "float32"
    with pytest.raises(ValueError, match="no dtype"):
        shape_of(torch_dtype=None).resolve_dtype("auto")
    with pytest.raises(ValueError, match="'int8' is not supported"):
        shape_of().resolve_dtype("int8")


def test_a_folder_without_a_readable_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        TargetShape.from_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        TargetShape.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        TargetShape.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a JSON list"):
        TargetShape.from_folder(tmp_path)


def test_the_config_module_imports_no_torch() -> None:
    code = "import sys, target_worker.model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0


def test_a_missing_misshaped_or_left_over_tensor_is_named(tmp_path: Path) -> None:
    make_target(tmp_path, "Qwen3")
    good = load_file(tmp_path / "model.safetensors")

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_target(tmp_path)

    name = "model.layers.2.self_attn.k_norm.weight"
    refused({k: v for k, v in good.items() if k != name}, f"no tensor {name}")
    refused(good | {name: torch.ones(9)}, rf"{name} in model.safetensors is \[9\], the config asks for \[8\]")
    refused(good | {"model.layers.0.self_attn.sinks": torch.ones(6)}, r"1 tensors .*self_attn\.sinks")
    refused(good | {name: torch.ones(8, dtype=torch.int8)}, r"is int8 \[8\], only matrices")
    save_file(good, tmp_path / "model.safetensors")
    load_target(tmp_path)


def test_dummy_weights_need_no_files_and_give_sane_logits(tmp_path: Path) -> None:
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(SMOL | small | {"intermediate_size": 128, "vocab_size": 500}))
    model, shape = load_target(tmp_path, load_format="dummy")
    again, _ = load_target(tmp_path, load_format="dummy")
    assert torch.equal(model.embedding, again.embedding)
    x = torch.randn(3, 64).to(model.dtype)
    assert torch.equal(model.layers[3].o(x), again.layers[3].o(x))
    assert not torch.equal(model.layers[3].o(x), model.layers[2].o(x))
    x = model.hidden(torch.arange(9), torch.arange(9), lambda layer, q, k, v: q.flatten(1))
    logits = model.logits(x)
    assert shape.stored_dtype == "bfloat16"
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3
    with pytest.raises(ValueError, match=r"'pickle' is not known.*auto, dummy"):
        load_target(tmp_path, load_format="pickle")
