"""A Hugging Face folder's config.json, read without torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding as config.json asks for it; memsvc.device.rope computes it."""

    rope_type: str
    """One of ROPE_TYPES. dynamic equals default up to the trained length, and no further is served."""
    theta: float
    """Base of the wavelengths."""
    rotary_dim: int
    """Leading dimensions of a head that are rotated; the others pass."""
    factor: float
    """How far positions are stretched; 1 for default."""
    trained_len: int
    """Positions the model was trained on before stretching."""
    low_freq_factor: float
    """llama3: wavelengths above trained_len / low_freq_factor are stretched fully."""
    high_freq_factor: float
    """llama3: wavelengths below trained_len / high_freq_factor are left alone."""
    beta_fast: float
    """yarn: rotations over trained_len above which a dimension is left alone."""
    beta_slow: float
    """yarn: rotations below which a dimension is stretched fully."""
    truncate: bool
    """yarn: round the two bounds to whole dimensions."""
    attention_factor: float | None
    """yarn: multiplies cos and sin; None derives it from factor."""
    mscale: float
    """yarn: see memsvc.device.rope; 0 is off."""
    mscale_all_dim: float
    """yarn: likewise."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError that names the file and what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ValueError(f"cannot read {path}: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise ValueError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a JSON {type(data).__name__}, not an object")
    return data


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ValueError if the folder or the file is missing or not JSON."""
    if not folder.is_dir():
        raise ValueError(f"model folder {folder} does not exist")
    return read_json(folder / "config.json")


def get_int(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive whole number. None or absent takes the default; without one it is a ValueError."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config.json lacks {key}")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive whole number, got {value!r}")
    return value


def get_float(config: dict[str, Any], key: str, default: float | None = None) -> float:
    """A number. None or absent takes the default; without one it is a ValueError."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config.json lacks {key}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"config.json: {key} must be a number, got {value!r}")
    return float(value)


def get_bool(config: dict[str, Any], key: str, default: bool) -> bool:
    """true or false; None or absent takes the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be true or false, got {value!r}")
    return value


def rope_spec(config: dict[str, Any], head_dim: int) -> RopeSpec:
    """Reads rope_theta with rope_scaling, and rope_parameters, the newer spelling.

    Raises ValueError for a type that is not in ROPE_TYPES and for missing or odd numbers.
    """
    params = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(params, dict):
        raise ValueError(f"config.json: rope parameters must be an object, got {params!r}")
    rope_type = params.get("rope_type") or params.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    partial = get_float(params, "partial_rotary_factor", get_float(config, "partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(
            f"{rotary_dim} rotary dimensions of a head of {head_dim}: need an even number above 0, and no more than that"
        )
    plain = rope_type == "default"
    trained_len = config.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
    limit = get_int(config, "max_position_embeddings")
    factor = 1.0 if plain else _factor(params, rope_type, limit, trained_len)
    llama3 = rope_type == "llama3"
    return RopeSpec(
        rope_type=rope_type,
        theta=get_float(params, "rope_theta", get_float(config, "rope_theta", 10000.0)),
        rotary_dim=rotary_dim,
        factor=factor,
        trained_len=trained_len or limit,
        low_freq_factor=get_float(params, "low_freq_factor", None if llama3 else 1.0),
        high_freq_factor=get_float(params, "high_freq_factor", None if llama3 else 1.0),
        beta_fast=params.get("beta_fast") or 32.0,
        beta_slow=params.get("beta_slow") or 1.0,
        truncate=get_bool(params, "truncate", True),
        attention_factor=params.get("attention_factor"),
        mscale=params.get("mscale") or 0.0,
        mscale_all_dim=params.get("mscale_all_dim") or 0.0,
    )


def _factor(params: dict[str, Any], rope_type: str, limit: int, trained_len: int | None) -> float:
    if rope_type == "yarn" and params.get("factor") is None and trained_len:
        return limit / trained_len
    factor = get_float(params, "factor")
    if factor < 1.0:
        raise ValueError(f"rope factor {factor} is below 1")
    return factor


def max_positions(config: dict[str, Any], rope: RopeSpec) -> int:
    """Longest context the model can serve: its trained length, stretched where rope says so."""
    limit = get_int(config, "max_position_embeddings")
    match rope.rope_type:
        case "yarn":
            return max(limit, int(rope.trained_len * rope.factor))
        case "linear":
            return int(limit * rope.factor)
        case _:
            return limit
