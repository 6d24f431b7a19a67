"""Looks keys of a drafter's config.json up in all the places and spellings that exist."""

from typing import Any

from memsvc.device.hf_config import RopeSpec, rope_spec
from memsvc.device.quant_config import check_quantization

SLIDING = "sliding_attention"
FULL = "full_attention"

_MISSING: Any = object()


class ConfigJson:
    """A parsed config.json. A key is looked up in dflash_config first, then at the top level.

    speculators keeps the layer stack's own keys in transformer_layer_config: they count as top
    level, after the real one. null counts as absent. Every method raises ValueError naming the key.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        nested = raw.get("dflash_config") or {}
        inner = raw.get("transformer_layer_config") or {}
        if not isinstance(nested, dict) or not isinstance(inner, dict):
            raise ValueError("dflash_config and transformer_layer_config must be objects")
        self._nested = nested
        self._top = inner | {key: value for key, value in raw.items() if value is not None}

    @property
    def architecture(self) -> str:
        """The first of `architectures`, or an empty string."""
        names = self._top.get("architectures") or [""]
        return str(names[0])

    def refuse_other_methods(self) -> None:
        """Raise unless this is a DFlash or DFlash2 drafter in a form that is served here."""
        if not self.architecture.startswith("DFlash"):
            raise ValueError(
                f"architectures is [{self.architecture!r}], served are DFlashDraftModel and DFlash2DraftModel"
            )
        projector = self.get("projector_type", "dflash")
        if projector not in ("dflash", "dflash2"):
            raise ValueError(f"projector_type {projector!r} is another method than DFlash")
        if self.flag("sample_from_anchor"):
            raise ValueError("sample_from_anchor is true: row 0 would predict, which is not the DFlash convention")
        activation = self.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act {activation!r} is not silu")
        check_quantization(self.get("quantization_config", None))

    def get(self, key: str, default: Any) -> Any:
        """The raw value: dflash_config, then top level, then default."""
        for home in (self._nested, self._top):
            if home.get(key) is not None:
                return home[key]
        if default is _MISSING:
            raise ValueError(f"{key} is missing")
        return default

    def integer(self, key: str, default: int = _MISSING, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{key} is {value!r}, not a whole number >= {least}")
        return value

    def number(self, key: str, default: float) -> float:
        """Any number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key} is {value!r}, not a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """true or false; absent is false."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {value!r}, not true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise ValueError(f"{key} is {value!r}, not a string")
        return value

    def layers(self) -> list[tuple[int, bool]]:
        """(window or 0, causal) of every draft layer.

        Causality: is_causal at the top, else dflash_config.causal, else sliding layers are causal
        and full ones are not. speculators says sliding_window_non_causal instead.
        """
        types = self._layer_types()
        window = 0
        if SLIDING in types:
            window = self._window()
        override = self._top.get("is_causal")
        if override is None:
            override = self._nested.get("causal")
        if override is not None and not isinstance(override, bool):
            raise ValueError(f"is_causal / causal is {override!r}, not true or false")
        sliding_causal = not self.flag("sliding_window_non_causal") if override is None else override
        full_causal = bool(override)
        return [(window, sliding_causal) if kind == SLIDING else (0, full_causal) for kind in types]

    def _layer_types(self) -> list[str]:
        num_layers = self.integer("num_hidden_layers")
        types = self.get("layer_types", [FULL] * num_layers)
        if not isinstance(types, list) or len(types) != num_layers:
            raise ValueError(f"layer_types is {types!r}, not one entry for each of {num_layers} layers")
        unknown = set(types) - {SLIDING, FULL}
        if unknown:
            raise ValueError(f"layer_types holds {sorted(map(str, unknown))}, known are {SLIDING} and {FULL}")
        if self.flag("use_swa") and SLIDING not in types:
            return [SLIDING] * num_layers
        return types

    def _window(self) -> int:
        key = "swa_window_size" if self.get("swa_window_size", None) is not None else "sliding_window"
        return self.integer(key)

    def target_layer_ids(self) -> tuple[int, ...]:
        """Zero-based tapped layers. Without any key: one per draft layer, evenly from 1 to N - 3."""
        ids = self.get("target_layer_ids", None)
        if ids is None and (shifted := self.get("aux_hidden_state_layer_ids", None)) is not None:
            # speculators counts hidden_states, of which 0 is the embedding's output.
            ids = [index - 1 for index in _whole_numbers("aux_hidden_state_layer_ids", shifted)]
        depth = self.integer("num_target_layers", 0, least=0)
        if ids is None:
            ids = _spread(self.integer("num_hidden_layers"), depth)
        for index in _whole_numbers("target_layer_ids", ids):
            if index < 0 or (depth and index >= depth):
                raise ValueError(
                    f"target_layer_ids {ids}: {index} is not a layer of a target with {depth or '?'} layers"
                )
        return tuple(ids)

    def rope(self, head_dim: int) -> RopeSpec:
        """The rotary embedding, from either transformers spelling: rope_theta with rope_scaling, or rope_parameters."""
        newer = self.get("rope_parameters", None)
        values = dict(self.get("rope_scaling", {}) if newer is None else _one_rope(newer))
        for key, default in (("rope_theta", 1e6), ("partial_rotary_factor", 1.0)):
            if values.get(key) is None:
                values[key] = self.number(key, default)
        known = {"rope_parameters": values, "max_position_embeddings": self.integer("max_position_embeddings", 1 << 30)}
        trained_len = self.get("original_max_position_embeddings", None)
        return rope_spec(known | {"original_max_position_embeddings": trained_len}, head_dim)

    @property
    def is_neox(self) -> bool:
        """Rotated pairs are a head's two halves; otherwise neighbours. Two spellings."""
        key = "is_neox_style" if self.get("is_neox_style", None) is not None else "rope_is_neox_style"
        return self.get(key, None) is None or self.flag(key)


def _whole_numbers(key: str, value: Any) -> list[int]:
    if not isinstance(value, list | tuple) or not value or not all(type(item) is int for item in value):
        raise ValueError(f"{key} is {value!r}, not a list of layer numbers")
    return list(value)


def _spread(num_layers: int, depth: int) -> list[int]:
    if depth < 1:
        raise ValueError("target_layer_ids is missing, and so is num_target_layers to derive it from")
    if num_layers == 1:
        return [depth // 2]
    return [round(1 + index * (depth - 4) / (num_layers - 1)) for index in range(num_layers)]


def _one_rope(parameters: Any) -> dict[str, Any]:
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters is {parameters!r}, not an object")
    by_type = [value for value in parameters.values() if isinstance(value, dict)]
    if not by_type:
        return parameters
    if any(value != by_type[0] for value in by_type):
        raise ValueError(f"rope_parameters differ between layer types: {parameters}")
    return by_type[0]
