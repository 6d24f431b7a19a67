"""The kinds of quantization_config that are read, and every way to differ from them."""

import copy
from typing import Any

import pytest

from memsvc.device.quant_config import check_quantization, int8_config, is_int8, is_quantised
from tests.support.fp8_folders import BLOCKS, CHANNEL

GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")


def changed(path: tuple[str, ...], value: Any, base: dict[str, Any] | None = None) -> dict[str, Any]:
    config = copy.deepcopy(int8_config(["Linear"], ["lm_head"]) if base is None else base)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


def test_the_layout_is_that_of_compressed_tensors() -> None:
    assert int8_config(["Linear", "Embedding"], ["lm_head"]) == {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear", "Embedding"],
                "weights": {
                    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
                "format": "int-quantized",
            }
        },
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
    }  # fmt: skip


@pytest.mark.parametrize(
    "found",
    [
        None,
        {},
        int8_config(["Linear"], []),
        changed((*WEIGHTS, "observer"), "mse"),
        changed((*WEIGHTS, "group_size"), -1),
        changed((*GROUP, "format"), None),
        changed(("ignore",), []),
        changed(("sparsity_config",), {}),
        changed(("version",), "0.15.0"),
        {key: value for key, value in int8_config(["Linear"], []).items() if key != "quantization_status"},
    ],
)
def test_what_comes_to_the_same_is_read(found: Any) -> None:
    check_quantization(found)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("quant_method",), "gptq", "quant_method is 'gptq', supported is 'compressed-tensors' or 'fp8'"),
        (
            ("format",),
            "pack-quantized",
            "format is 'pack-quantized', supported is 'int-quantized' or 'float-quantized'",
        ),
        (("quantization_status",), "frozen", "quantization_status is 'frozen'"),
        (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme is"),
        (("sparsity_config",), {"format": "sparse-24-bitmask"}, "sparsity_config is"),
        (("transform_config",), {"config_groups": {"R1": {}}}, "transform_config is"),
        (("config_groups",), {}, "config_groups is .* one group"),
        (("config_groups", "group_1"), {}, "config_groups is .* one group"),
        (GROUP, ["Linear"], r"weights must be .* \['Linear'\]"),
        ((*GROUP, "format"), "float-quantized", "format is 'float-quantized'"),
        ((*GROUP, "input_activations"), {"num_bits": 8}, "input_activations is"),
        ((*GROUP, "output_activations"), {"num_bits": 8}, "output_activations is"),
        (WEIGHTS, None, "weights must be an object"),
        ((*WEIGHTS, "num_bits"), 4, "num_bits is 4, supported is 8"),
        ((*WEIGHTS, "type"), "float", "type is 'float'"),
        ((*WEIGHTS, "symmetric"), False, "symmetric is False"),
        ((*WEIGHTS, "symmetric"), 1, "symmetric is 1, supported is True"),
        ((*WEIGHTS, "strategy"), "group", "strategy is 'group', supported is 'channel'"),
        ((*WEIGHTS, "strategy"), None, "strategy is None"),
        ((*WEIGHTS, "group_size"), 128, "group_size is 128"),
        ((*WEIGHTS, "block_structure"), [128, 128], "block_structure is"),
        ((*WEIGHTS, "dynamic"), True, "dynamic is True"),
        ((*WEIGHTS, "actorder"), "weight", "actorder is 'weight'"),
    ],
)
def test_every_other_scheme_is_refused_by_key_and_value(path: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"quantization_config: {message}"):
        check_quantization(changed(path, value))


@pytest.mark.parametrize(
    "found",
    [
        CHANNEL,
        changed((*GROUP, "input_activations"), None, CHANNEL),
        changed((*GROUP, "format"), "float-quantized", CHANNEL),
        BLOCKS,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        BLOCKS | {"scale_fmt": "ue8m0", "modules_to_not_convert": None},
    ],
)
def test_fp8_with_a_scale_a_row_or_a_block_is_read(found: dict[str, Any]) -> None:
    check_quantization(found)


@pytest.mark.parametrize(
    ("base", "path", "value", "message"),
    [
        (CHANNEL, (*WEIGHTS, "strategy"), "tensor", "strategy is 'tensor', supported is 'channel'"),
        (CHANNEL, (*WEIGHTS, "strategy"), "block", "strategy is 'block', supported is 'channel'"),
        (CHANNEL, (*WEIGHTS, "type"), "int", "type is 'int', supported is 'float'"),
        (CHANNEL, (*WEIGHTS, "num_bits"), 4, "num_bits is 4"),
        (CHANNEL, (*GROUP, "input_activations", "dynamic"), False, "dynamic is False, supported is True"),
        (CHANNEL, (*GROUP, "input_activations", "strategy"), "tensor", "strategy is 'tensor', supported is 'token'"),
        (CHANNEL, (*GROUP, "input_activations"), "all", "input_activations is 'all'"),
        (CHANNEL, ("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme is"),
        (CHANNEL, ("format",), "nvfp4-pack-quantized", "format is 'nvfp4-pack-quantized'"),
        (BLOCKS, ("weight_block_size",), None, r"weight_block_size is None, supported is \[128, 128\]"),
        (BLOCKS, ("weight_block_size",), [64, 64], r"weight_block_size is \[64, 64\]"),
        (BLOCKS, ("activation_scheme",), "static", "activation_scheme is 'static', supported is 'dynamic'"),
        (BLOCKS, ("fmt",), "e5m2", "fmt is 'e5m2', supported is 'e4m3'"),
        (BLOCKS, ("quant_method",), "fbgemm_fp8", "quant_method is 'fbgemm_fp8'"),
    ],
)
def test_every_other_fp8_is_refused_by_key_and_value(
    base: dict[str, Any], path: tuple[str, ...], value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"quantization_config: {message}"):
        check_quantization(changed(path, value, base))


@pytest.mark.parametrize("found", [{"bits": 4}, "int8", [1]])
def test_what_is_no_such_object_is_refused(found: Any) -> None:
    with pytest.raises(ValueError, match="quantization_config"):
        check_quantization(found)


def test_a_model_of_several_parts_may_say_it_in_either_place() -> None:
    quantization = int8_config(["Linear"], [])
    assert is_int8({"quantization_config": quantization})
    assert is_int8({"text_config": {"quantization_config": quantization}})
    assert not is_int8({"text_config": {}, "quantization_config": None})
    assert not is_int8({"quantization_config": BLOCKS})
    configs = [{"quantization_config": BLOCKS}, {"text_config": {"quantization_config": CHANNEL}}, {"text_config": {}}]
    assert [is_quantised(config) for config in configs] == [True, True, False]
