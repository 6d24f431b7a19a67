"""Targets with their layers' matrices in fp8: rounded while they are read, or stored so."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_worker.train.fused_target import is_plain
from memsvc.device.checkpoint import RandomSource
from memsvc.device.fp8 import Fp8Linear, QuantRows, quantise
from memsvc.device.layers import Linear
from target_worker.model.decoder import Decoder
from target_worker.model.fp8_stacks import fp8_stacks, kept_in_fp8, stack_of, stays_fp8
from target_worker.model.weights import load_target
from tests.support.fp8_folders import BLOCKS, CHANNEL, by_blocks, by_rows, make_floats, make_fp8
from tests.support.tiny_hybrid import make_hybrid
from tests.support.tiny_target import make_target

SCHEMES = [pytest.param(by_rows, CHANNEL, id="rows"), pytest.param(by_blocks, BLOCKS, id="blocks")]
MAKERS: list[Any] = [
    pytest.param(lambda path: make_target(path, "Qwen2"), id="dense"),
    pytest.param(make_hybrid, id="hybrid"),
    pytest.param(lambda path: make_hybrid(path, family="Qwen3Next", num_experts=0), id="fused"),
]


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed weight cannot be looked at."""
    monkeypatch.setattr("memsvc.device.layers.is_packable", lambda weight: False)


@pytest.fixture
def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device."""
    monkeypatch.setattr("target_worker.model.weights.stays_fp8", lambda device, dtype: True)


def assert_is(layer: Linear, want: QuantRows) -> None:
    assert isinstance(layer, Fp8Linear)
    assert torch.equal(layer.weight.float(), want.values.float())
    assert torch.equal(layer.scales, want.scales)


def logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    """Of a dense target, every token attending to itself and those before."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    return model.logits(model.hidden(torch.tensor(ids), torch.arange(len(ids)), attend)).float()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_flag_rounds_the_layers_matrices_and_nothing_else(
    tmp_path: Path, make: Callable[[Path], Any], dtype: str
) -> None:
    make(tmp_path)
    plain, shape = load_target(tmp_path, dtype)
    model, same = load_target(tmp_path, dtype, quantization="fp8")
    assert shape == same
    for layer, want in zip(model.matrices, plain.matrices, strict=True):
        rows = quantise(want.weight)
        # Rows of nothing, which fill a matrix up, keep the scale they are given.
        scales = torch.where(want.weight.float().abs().amax(1, keepdim=True) > 0, rows.scales, 0.0)
        assert_is(layer, QuantRows(rows.values, scales, rows.dtype))
        assert (layer.bias is None) == (want.bias is None)
        if layer.bias is not None and want.bias is not None:
            assert torch.equal(layer.bias, want.bias)
    assert torch.equal(model.embedding, plain.embedding)
    assert type(model.head) is Linear
    assert model.dtype == getattr(torch, dtype)
    assert torch.equal(model.head.weight, plain.head.weight)


def test_random_weights_are_rounded_too(tmp_path: Path) -> None:
    make_target(tmp_path, "Llama")
    model, _ = load_target(tmp_path, "bfloat16", load_format="dummy", quantization="fp8")
    assert all(isinstance(layer, Fp8Linear) for layer in model.matrices)
    # Training has kernels for layers in floats.
    assert not any(is_plain(layer) for layer in model.layers)


def test_no_two_matrices_are_in_floats_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_hybrid(tmp_path)
    plain, seen = RandomSource.get, []

    def get(self: RandomSource, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert [other for other, tensor in seen if tensor() is not None] == [], name
        made = plain(self, name, shape, dtype)
        if stack_of(name):
            seen.append((name, weakref.ref(made)))
        return made

    monkeypatch.setattr(RandomSource, "get", get)
    load_target(tmp_path, "bfloat16", load_format="dummy", quantization="fp8")
    assert len(seen) == 3 * 6 + 7


def test_logits_in_fp8_are_near_the_plain_ones(tmp_path: Path) -> None:
    make_target(tmp_path, "Qwen3")
    want = logits(load_target(tmp_path, "float32")[0], list(range(3, 40)))
    found = logits(load_target(tmp_path, "float32", quantization="fp8")[0], list(range(3, 40)))
    apart = float((found - want).norm() / want.norm())
    assert 0.005 < apart < 0.1


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("store", "config"), SCHEMES)
def test_a_checkpoint_in_fp8_is_read_as_what_it_stands_for_where_fp8_is_not_computed(
    tmp_path: Path, make: Callable[[Path], Any], store: Any, config: dict[str, Any]
) -> None:
    make(tmp_path / "plain")
    folder = make_fp8(tmp_path / "plain", tmp_path / "fp8", store, config)
    want, _ = load_target(make_floats(folder, tmp_path / "floats"), "float32")
    found, _ = load_target(folder, "float32")
    for layer, plain in zip(found.matrices, want.matrices, strict=True):
        assert type(layer) is Linear
        assert torch.equal(layer.weight, plain.weight)


@pytest.mark.parametrize("quantization", ["", "fp8"])
def test_a_scale_a_row_stays_as_it_is_stored(tmp_path: Path, stays: None, quantization: str) -> None:
    make_target(tmp_path / "plain", "Qwen3")
    folder = make_fp8(tmp_path / "plain", tmp_path / "fp8", by_rows, CHANNEL)
    model, _ = load_target(folder, "bfloat16", quantization=quantization)
    stored = load_file(folder / "model.safetensors")
    names = [[f"self_attn.{part}_proj" for part in "qkv"], ["self_attn.o_proj"]]
    names += [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
    for i, layer in enumerate(model.matrices):
        whole = [f"model.layers.{i // 4}.{name}.weight" for name in names[i % 4]]
        values = torch.cat([stored[name].float() for name in whole])
        scales = torch.cat([stored[f"{name}_scale"].float() for name in whole])
        assert_is(layer, QuantRows(values, scales, torch.bfloat16))


def test_a_scale_a_block_is_made_one_a_row(tmp_path: Path, stays: None) -> None:
    make_target(tmp_path / "plain", "Llama", hidden_size=192, intermediate_size=272)
    folder = make_fp8(tmp_path / "plain", tmp_path / "fp8", by_blocks, BLOCKS)
    want, _ = load_target(make_floats(folder, tmp_path / "floats"), "float32")
    model, _ = load_target(folder, "bfloat16")
    for layer, exact in zip(model.matrices, want.matrices, strict=True):
        assert_is(layer, quantise(exact.weight))


def test_parts_that_are_not_stored_in_fp8_join_those_that_are(tmp_path: Path, stays: None) -> None:
    make_hybrid(tmp_path / "plain")
    folder = make_fp8(tmp_path / "plain", tmp_path / "fp8", by_blocks, BLOCKS)
    model, _ = load_target(folder, "bfloat16")
    assert all(isinstance(layer, Fp8Linear) for layer in model.matrices)


def test_a_matrix_of_which_nothing_is_stored_in_fp8_stays_as_it_is(tmp_path: Path, stays: None) -> None:
    make_target(tmp_path / "plain", "Llama")
    folder = make_fp8(tmp_path / "plain", tmp_path / "fp8", by_rows, CHANNEL)
    plain, stored = load_file(tmp_path / "plain" / "model.safetensors"), load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    del stored[f"{name}_scale"]
    save_file(stored | {name: plain[name]}, folder / "model.safetensors")
    kinds = [type(layer) for layer in load_target(folder, "bfloat16")[0].matrices]
    assert [i for i, kind in enumerate(kinds) if kind is Linear] == [7]
    kinds = [type(layer) for layer in load_target(folder, "bfloat16", quantization="fp8")[0].matrices]
    assert set(kinds) == {Fp8Linear}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_scale": None}, r"no tensor model\.layers\.0\.mlp\.up_proj\.weight_scale \(wanted \[80, 1\]\)"),
        ({"_scale": torch.ones(1)}, r"up_proj\.weight_scale in .* is \[1\], the config asks for \[80, 1\]"),
        ({"_scale": torch.zeros(80, 1)}, r"up_proj\.weight_scale: 80 of 80 scales are not above 0"),
        ({"_scale": None, "_scale_inv": torch.ones(2, 1)}, r"weight_scale_inv .* is \[2, 1\], .* asks for \[1, 1\]"),
        ({"_scale": torch.ones(80, 1).int()}, r"up_proj\.weight_scale is torch\.int32, scales are floats"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    make_target(tmp_path / "plain", "Llama")
    folder = make_fp8(tmp_path / "plain", tmp_path / "fp8", by_rows, CHANNEL)
    name, stored = "model.layers.0.mlp.up_proj.weight", load_file(folder / "model.safetensors")
    changed: dict[str, Any] = stored | {name + suffix: tensor for suffix, tensor in change.items()}
    save_file({key: tensor for key, tensor in changed.items() if tensor is not None}, folder / "model.safetensors")
    for quantization in ("", "fp8"):
        with pytest.raises(ValueError, match=message):
            load_target(folder, quantization=quantization)


def test_a_scheme_that_is_not_read_is_named(tmp_path: Path) -> None:
    make_target(tmp_path / "plain", "Llama")
    folder = make_fp8(tmp_path / "plain", tmp_path / "fp8", by_blocks, BLOCKS | {"activation_scheme": "static"})
    with pytest.raises(ValueError, match=r"config\.json: quantization_config: activation_scheme is 'static'"):
        load_target(folder)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    make_target(tmp_path, "Llama")
    name, stored = "model.layers.2.self_attn.o_proj.weight", load_file(tmp_path / "model.safetensors")
    stored[name][3, 3] = torch.nan
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name}: 1 rows hold weights that are not finite"):
        load_target(tmp_path, quantization="fp8")


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("model.layers.0.self_attn.k_proj.weight", (0, 0)),
        ("model.language_model.layers.12.linear_attn.in_proj_ba.weight", (12, 4)),
        ("model.layers.3.mlp.down_proj.bias", None),
        ("model.layers.3.linear_attn.conv1d.weight", None),
        ("model.layers.3.input_layernorm.weight", None),
        ("mtp.layers.0.self_attn.k_proj.weight", None),
        ("model.visual.layers.0.mlp.up_proj.weight", None),
        ("lm_head.weight", None),
        ("model.embed_tokens.weight", None),
    ],
)
def test_matrices_of_layers_are_known_by_name(name: str, stack: tuple[int, int] | None) -> None:
    assert stack_of(name) == stack


def test_a_part_in_fp8_takes_its_whole_matrix_along() -> None:
    wanted = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    assert kept_in_fp8(wanted, wanted[1:2], "") == set(wanted[:3])
    assert kept_in_fp8(wanted, [], "") == set()
    assert kept_in_fp8([*wanted, "lm_head.weight"], [], "fp8") == set(wanted)
    assert fp8_stacks(wanted) == {(0, 0), (0, 1)}


def test_fp8_stays_where_it_is_multiplied_to_bfloat16() -> None:
    places = [("cuda", "bfloat16"), ("cuda:1", "bfloat16"), ("cuda", "float32"), ("cpu", "bfloat16")]
    assert [stays_fp8(*place) for place in places] == [True, True, False, False]


def test_a_folder_may_say_fp8_in_its_config_and_store_floats(tmp_path: Path) -> None:
    make_target(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": CHANNEL}))
    assert all(type(layer) is Linear for layer in load_target(tmp_path, "float32")[0].matrices)
