"""quantization_config of config.json: the kinds that are read, and the one that is written. No torch: launch imports it.

int8 is "int-quantized" of compressed-tensors with weights alone in 8 bits: X.weight is int8 [out, in] and
X.weight_scale is float [out, 1], one symmetric scale a row. fp8 is either "float-quantized" of it, the same with e4m3
for int8, or the form of DeepSeek and Qwen: X.weight is e4m3 and X.weight_scale_inv float, a scale for each 128 x 128.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SCALE_SUFFIX = "_scale"
"""Added to a tensor's name, the name of its scales, one a row."""
BLOCK_SCALE_SUFFIX = "_scale_inv"
"""Likewise of scales that are one a block."""
ZERO_POINT_SUFFIX = "_zero_point"
"""Likewise, what an asymmetric checkpoint holds beside them."""
BLOCK = 128
"""Rows and columns of a block."""
HEADER_FP8 = "F8_E4M3"
"""How the header of a safetensors file calls e4m3."""

_METHOD, _BLOCK_METHOD = "compressed-tensors", "fp8"
_FORMAT, _FLOAT_FORMAT = "int-quantized", "float-quantized"
_WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_WEIGHTS_OF: dict[str, dict[str, Any]] = {_FORMAT: _WEIGHTS, _FLOAT_FORMAT: {**_WEIGHTS, "type": "float"}}
_ACTIVATIONS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
"""Inputs of fp8 products as they are computed anyway: one scale a row, found at run time."""
_ABSENT: dict[str, tuple[Any, ...]] = {
    "group_size": (None, -1),
    "block_structure": (None,),
    "dynamic": (None, False),
    "actorder": (None, False),
}
"""Keys of weights, and the values that mean nothing."""


def int8_config(targets: Sequence[str], ignore: Sequence[str]) -> dict[str, Any]:
    """The quantization_config of a folder. targets: classes of modules in int8; ignore: such modules that are not."""
    return {
        "quant_method": _METHOD,
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": list(targets),
                "weights": {**_WEIGHTS, "group_size": None, "dynamic": False},
                "input_activations": None,
                "output_activations": None,
                "format": _FORMAT,
            }
        },
        "kv_cache_scheme": None,
        "ignore": list(ignore),
    }


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json says that weights are stored in fewer bits, at its top or in text_config."""
    return bool(_found(config))


def is_int8(config: Mapping[str, Any]) -> bool:
    """Whether it says that they are stored in int8."""
    found = _found(config)
    return isinstance(found, dict) and found.get("format") == _FORMAT


def _found(config: Mapping[str, Any]) -> Any:
    inner = config.get("text_config")
    return config.get("quantization_config") or (isinstance(inner, dict) and inner.get("quantization_config"))


def check_quantization(found: Any) -> None:
    """Raise ValueError, naming key and value, if found is a quantization_config of a kind that is not read.

    None and an empty object are no quantization, and pass. Keys that say how the scales were found count for nothing,
    and so do lists of modules: what a tensor is stored in, its file says.
    """
    if not found:
        return
    if not isinstance(found, dict):
        raise ValueError(f"quantization_config must be an object, got {found!r:.80}")
    _expect(found, "quant_method", _METHOD, _BLOCK_METHOD)
    if found["quant_method"] == _BLOCK_METHOD:
        _check_blocks(found)
        return
    _expect(found, "format", *_WEIGHTS_OF)
    if found.get("quantization_status", "compressed") != "compressed":
        raise _refusal("quantization_status", found["quantization_status"], "compressed")
    _refuse_set(found, ("kv_cache_scheme", "sparsity_config", "transform_config"))
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError(f"quantization_config: config_groups is {groups!r:.120}, supported is one group")
    _check_group(next(iter(groups.values())), found["format"])


def _check_blocks(found: dict[str, Any]) -> None:
    _expect(found, "weight_block_size", [BLOCK, BLOCK])
    for key, value in {"fmt": "e4m3", "activation_scheme": "dynamic"}.items():
        if found.get(key) is not None:
            _expect(found, key, value)


def _check_group(group: Any, form: str) -> None:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ValueError(f"quantization_config: weights must be an object in the one group, which is {group!r:.120}")
    if group.get("format") is not None:
        _expect(group, "format", form)
    _refuse_set(group, ("output_activations",))
    inputs = group.get("input_activations")
    if form == _FORMAT or not isinstance(inputs, dict):
        _refuse_set(group, ("input_activations",))
    else:
        for key, value in _ACTIVATIONS.items():
            _expect(inputs, key, value)
    weights = group["weights"]
    for key, value in _WEIGHTS_OF[form].items():
        _expect(weights, key, value)
    for key, nothing in _ABSENT.items():
        if weights.get(key) not in nothing:
            raise _refusal(key, weights[key], nothing[0])


def _expect(config: dict[str, Any], key: str, *wanted: Any) -> None:
    value = config.get(key)
    if value not in wanted or isinstance(value, bool) != isinstance(wanted[0], bool):
        raise _refusal(key, value, *wanted)


def _refuse_set(config: dict[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if config.get(key):
            raise _refusal(key, config[key], None)


def _refusal(key: str, value: Any, *wanted: Any) -> ValueError:
    supported = " or ".join(repr(one) for one in wanted)
    return ValueError(f"quantization_config: {key} is {value!r:.120}, supported is {supported}")
