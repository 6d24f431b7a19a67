"""The layout in which Qwen3.8-27B is published: at full size by names and shapes, scaled down with all its numbers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from target_worker.model.config import TargetShape
from target_worker.model.wanted import wanted_tensors
from target_worker.model.weights import build, load_target
from tests.support import published_hybrid as published
from tests.support.make_drafter import random_tensors
from tests.support.meta_source import MetaSource
from tests.support.published_hybrid import CONFIG, TEXT, VISION, num_parameters, write_published
from tests.support.tiny_hybrid import SIZES, HybridRig, make_hybrid
from tests.support.tiny_hybrid import VISION as SMALL_VISION
from tests.support.tiny_target import oracle_logits, tokens_of

ROOT = "model.language_model."
LINEAR, FULL = f"{ROOT}layers.1.linear_attn.", f"{ROOT}layers.3.self_attn."
SMALL_ROPE = TEXT["rope_parameters"] | {"mrope_section": [1, 1, 0]}
SMALL_TEXT = TEXT | SIZES | {
    "dtype": "float32", "layer_types": TEXT["layer_types"][:4], "rope_parameters": SMALL_ROPE,
}  # fmt: skip
SMALL = CONFIG | {"text_config": SMALL_TEXT, "vision_config": VISION | SMALL_VISION}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, torch.Tensor]]:
    """transformers' model, scaled down, and the tensors that its published folder would hold."""
    folder = tmp_path_factory.mktemp("small")
    oracle = make_hybrid(folder, nested=True, rope_parameters=SMALL_ROPE)
    tensors = load_file(folder / "model.safetensors") | random_tensors(published.mtp_sizes(SMALL))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == published.sizes(SMALL)
    return oracle, tensors


def without(tensors: dict[str, torch.Tensor], *prefixes: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def chunk_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    rig = HybridRig(folder)
    return rig.chunk(rig.open(1, len(tokens)), tokens)


def test_a_small_folder_of_the_published_names_computes_transformers_logits(small: Any, tmp_path: Path) -> None:
    oracle, tensors = small
    tokens = tokens_of(1, 90)
    got = chunk_logits(write_published(tmp_path / "published", SMALL, tensors), tokens)
    want = oracle_logits(oracle, tokens)
    assert want.std() > 0.3
    assert (got - want).abs().max() <= 1e-4
    text = without(tensors, "mtp.", "model.visual.")
    plain = {name.replace(ROOT, "model."): tensor for name, tensor in text.items()}
    config = SMALL_TEXT | {"architectures": ["Qwen3_5ForCausalLM"]}
    assert torch.equal(chunk_logits(write_published(tmp_path / "plain", config, plain), tokens), got)
    nested = write_published(tmp_path / "text alone", SMALL, text)
    assert torch.equal(chunk_logits(nested, tokens), got)


def test_the_checkpoint_of_full_size_has_the_published_number_of_tensors_parameters_and_bytes() -> None:
    parts = [published.text_sizes(CONFIG), published.vision_sizes(CONFIG), published.mtp_sizes(CONFIG)]
    assert [len(part) for part in parts] == [851, 333, 15]
    assert [num_parameters(part) for part in parts] == [26_895_998_464, 460_730_096, 424_699_392]
    assert len(published.sizes(CONFIG)) == 1199
    assert 2 * num_parameters(published.sizes(CONFIG)) == 55_562_855_904


def test_transformers_has_the_same_names_and_shapes_at_full_size() -> None:
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    sizes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert sizes == published.text_sizes(CONFIG) | published.vision_sizes(CONFIG)


def test_of_full_size_the_loader_wants_the_text_and_nothing_else() -> None:
    shape = TargetShape.from_json(CONFIG, {"eos_token_id": [248046, 248044]})
    wanted = wanted_tensors(shape, ROOT)
    assert wanted == published.text_sizes(CONFIG)
    assert (len(wanted), num_parameters(wanted)) == (851, 26_895_998_464)
    source = MetaSource(published.sizes(CONFIG))
    model = build(shape, source, torch.bfloat16, "meta")
    assert source.asked == wanted.keys()
    assert (len(model.layers), len(model.delta_layers)) == (64, 48)
    assert {tensor.device.type for tensor in (model.embedding, model.head.weight, model.norm.weight)} == {"meta"}


def test_full_size_under_plain_names_is_wanted_too() -> None:
    config = TEXT | {"architectures": ["Qwen3_5ForCausalLM"]}
    shape = TargetShape.from_json(config, {})
    plain = {name.replace(ROOT, "model."): size for name, size in published.text_sizes(CONFIG).items()}
    assert wanted_tensors(shape) == plain
    source = MetaSource(plain)
    build(shape, source, torch.bfloat16, "meta")
    assert source.unused() == []


def test_another_gate_than_the_published_one_is_refused() -> None:
    assert TargetShape.from_json(CONFIG, {}).linear is not None
    with pytest.raises(ValueError, match="output_gate_type is 'sigmoid'; the gate of linear layers must be silu"):
        TargetShape.from_json(CONFIG | {"text_config": TEXT | {"output_gate_type": "sigmoid"}}, {})


def refused(folder: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    write_published(folder, SMALL, tensors)
    with pytest.raises(ValueError, match=message):
        load_target(folder)


@pytest.mark.parametrize("name", sorted(published.text_sizes(SMALL)))
def test_each_tensor_that_is_missing_is_named_with_its_layers_kind(name: str, small: Any, tmp_path: Path) -> None:
    layer = name.split(".")[3] if ".layers." in name else ""
    kind = f", layer {layer} is {SMALL_TEXT['layer_types'][int(layer)]}" if layer else ""
    tensors = {key: tensor for key, tensor in small[1].items() if key != name}
    size = re.escape(str(list(published.text_sizes(SMALL)[name])))
    refused(tmp_path, tensors, rf"{tmp_path} has no tensor {name} \(wanted {size}{kind}\)$")


def test_a_tensor_of_another_shape_is_named_with_both_and_its_layers_kind(small: Any, tmp_path: Path) -> None:
    name = f"{FULL}q_proj.weight"
    halved = small[1] | {name: small[1][name][:64].clone()}
    where = rf"{name} in model-0000\d-of-0000\d\.safetensors"
    refused(tmp_path, halved, rf"{where} is \[64, 48\], the config asks for \[128, 48\], layer 3 is full_attention$")
    conv = f"{LINEAR}conv1d.weight"
    flat = small[1] | {conv: small[1][conv][:, 0].clone()}
    refused(tmp_path, flat, r"is \[96, 4\], the config asks for \[96, 1, 4\], layer 1 is linear_attention$")


def test_tensors_left_over_are_named_up_to_eight_and_counted(small: Any, tmp_path: Path) -> None:
    stray = {f"model.audio.{i}": torch.zeros(2) for i in range(11)}
    first = ", ".join(sorted(stray)[:8])
    message = f"11 tensors that Qwen3_5ForConditionalGeneration has no use for: {first} and 3 more$"
    refused(tmp_path, small[1] | stray, message)
    for name in (f"{LINEAR}conv1d.bias", f"{ROOT}layers.4.input_layernorm.weight", "model.norm.weight", "visual.x"):
        refused(tmp_path, small[1] | {name: torch.zeros(2)}, f" has 1 tensors that .* has no use for: {name}$")


def test_a_layer_of_the_other_kind_is_told_from_both_sides(small: Any, tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    write_published(tmp_path, SMALL | {"text_config": SMALL_TEXT | {"layer_types": kinds}}, small[1])
    with pytest.raises(ValueError, match="layer 1 is full_attention") as caught:
        load_target(tmp_path)
    missing, extra = str(caught.value).split("; ")
    assert missing.count("layers.1.self_attn.") == 6
    assert extra.startswith("9 tensors that Qwen3_5ForConditionalGeneration has no use for: ")
    assert extra.endswith(" and 1 more")
    assert extra.count("layers.1.linear_attn.") == 8


def test_a_name_in_the_index_that_its_file_lacks_is_named(small: Any, tmp_path: Path) -> None:
    write_published(tmp_path, SMALL, small[1])
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name = f"{LINEAR}A_log"
    other = next(file for file in weight_map.values() if file != weight_map[name])
    index.write_text(json.dumps({"weight_map": weight_map | {name: other}}))
    with pytest.raises(ValueError, match=f"{other}: cannot read {name}: "):
        load_target(tmp_path)
