"""quantization_config of config.json: the one kind that is read and written here. No torch: launch imports this file.

It is "int-quantized" of compressed-tensors with weights alone in 8 bits: X.weight is int8 [out, in] and X.weight_scale
is float [out, 1], one symmetric scale a row.
"""

from collections.abc import Sequence
from typing import Any

SCALE_SUFFIX = "_scale"
"""Added to a tensor's name, the name of its scales."""
ZERO_POINT_SUFFIX = "_zero_point"
"""Likewise, what an asymmetric checkpoint holds beside them."""

_METHOD, _FORMAT = "compressed-tensors", "int-quantized"
_WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
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


def is_int8(config: dict[str, Any]) -> bool:
    """Whether a parsed config.json says that weights are stored in int8, at its top or in text_config."""
    inner = config.get("text_config")
    return bool(config.get("quantization_config") or (isinstance(inner, dict) and inner.get("quantization_config")))


def check_quantization(found: Any) -> None:
    """Raise ValueError, naming key and value, if found is a quantization_config other than int8_config makes.

    None and an empty object are no quantization, and pass. Keys that say how the scales were found count for nothing.
    """
    if not found:
        return
    if not isinstance(found, dict):
        raise ValueError(f"quantization_config must be an object, got {found!r:.80}")
    _expect(found, "quant_method", _METHOD)
    _expect(found, "format", _FORMAT)
    if found.get("quantization_status", "compressed") != "compressed":
        raise _refusal("quantization_status", found["quantization_status"], "compressed")
    _refuse_set(found, ("kv_cache_scheme", "sparsity_config", "transform_config"))
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError(f"quantization_config: config_groups is {groups!r:.120}, supported is one group")
    _check_group(next(iter(groups.values())))


def _check_group(group: Any) -> None:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ValueError(f"quantization_config: weights must be an object in the one group, which is {group!r:.120}")
    if group.get("format") is not None:
        _expect(group, "format", _FORMAT)
    _refuse_set(group, ("input_activations", "output_activations"))
    weights = group["weights"]
    for key, value in _WEIGHTS.items():
        _expect(weights, key, value)
    for key, nothing in _ABSENT.items():
        if weights.get(key) not in nothing:
            raise _refusal(key, weights[key], nothing[0])


def _expect(config: dict[str, Any], key: str, wanted: Any) -> None:
    value = config.get(key)
    if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
        raise _refusal(key, value, wanted)


def _refuse_set(config: dict[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if config.get(key):
            raise _refusal(key, config[key], None)


def _refusal(key: str, value: Any, wanted: Any) -> ValueError:
    return ValueError(f"quantization_config: {key} is {value!r:.120}, supported is {wanted!r}")
