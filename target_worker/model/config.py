"""What a target is, as its folder says it. No torch here: launch imports this file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memsvc.device.hf_config import (
    RopeSpec,
    get_bool,
    get_float,
    get_int,
    max_positions,
    read_config,
    read_json,
    rope_spec,
)
from memsvc.device.kv_dtype import AUTO, kv_item_bytes
from memsvc.device.quant_config import check_quantization
from memsvc.wire.mem import KindSpec
from target_worker.model.linear_spec import (
    FULL,
    LINEAR,
    RING_PAGES,
    LinearSpec,
    read_layer_types,
    read_linear_spec,
    ring_page_rows,
)

HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3NextForCausalLM")
"""Gated delta net layers and gated attention. Of ForConditionalGeneration the text part alone is read."""
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", *HYBRIDS)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TARGET_KV = "target_kv"
STATE = "state"
RING = "ring"

_HEAD_DIMS = {"Qwen3ForCausalLM": 128} | dict.fromkeys(HYBRIDS, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetShape:
    """A decoder-only target's config with every default resolved."""

    architecture: str
    """One of ARCHITECTURES."""
    num_layers: int
    """Decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the MLP."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """The same for Q, K and V."""
    vocab_size: int
    """Rows of the embedding and of the head."""
    rms_norm_eps: float
    """Epsilon of every norm."""
    hidden_act: str
    """Activation of the MLP, as config.json names it."""
    tie_word_embeddings: bool
    """The head is the embedding."""
    qkv_bias: bool
    """q, k and v projections have a bias."""
    o_bias: bool
    """The output projection of attention has one."""
    mlp_bias: bool
    """The MLP's projections have one."""
    qk_norm: bool
    """Each head of q and k is normed before rotation."""
    rope: RopeSpec
    """Rotary embedding."""
    max_positions: int
    """Longest context the model can serve."""
    eos_ids: tuple[int, ...]
    """End-of-sequence ids of config.json and generation_config.json, ascending."""
    stored_dtype: str
    """dtype that the checkpoint says it has, empty if it says nothing."""
    layer_types: tuple[str, ...]
    """FULL or LINEAR, a layer each."""
    linear: LinearSpec | None
    """The gated delta net layers; None if no layer is LINEAR."""

    @classmethod
    def from_folder(cls, path: str | Path) -> "TargetShape":
        """Read a Hugging Face folder. Raises ValueError naming what is missing, odd or not supported."""
        folder = Path(path)
        config = read_config(folder)
        generation = folder / "generation_config.json"
        extra = read_json(generation) if generation.is_file() else {}
        try:
            return cls.from_json(config, extra)
        except ValueError as exc:
            raise ValueError(f"{folder / 'config.json'}: {exc}") from exc

    @classmethod
    def from_json(cls, config: dict[str, Any], generation: dict[str, Any]) -> "TargetShape":
        """The shape that a parsed config.json and generation_config.json (or {}) describe."""
        architecture = _architecture(config)
        inner = config.get("text_config") or {}
        if not isinstance(inner, dict):
            raise ValueError(f"text_config must be an object, got {inner!r:.80}")
        text = config | inner
        _refuse_unsupported(config, text)
        is_hybrid = architecture in HYBRIDS
        layer_types = read_layer_types(text, may_be_linear=is_hybrid)
        hidden_size = get_int(text, "hidden_size")
        num_heads = get_int(text, "num_attention_heads")
        num_kv_heads = get_int(text, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} key-value heads")
        head_dim = get_int(text, "head_dim", _HEAD_DIMS.get(architecture, hidden_size // num_heads))
        rope = rope_spec({"partial_rotary_factor": 0.25} | text if is_hybrid else text, head_dim)
        return cls(
            architecture=architecture,
            num_layers=len(layer_types),
            hidden_size=hidden_size,
            intermediate_size=get_int(text, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=get_int(text, "vocab_size"),
            rms_norm_eps=get_float(text, "rms_norm_eps", 1e-6),
            hidden_act=text.get("hidden_act") or "silu",
            tie_word_embeddings=get_bool(text | config, "tie_word_embeddings", False),
            **_biases(architecture, text),
            qk_norm=architecture == "Qwen3ForCausalLM" or is_hybrid,
            rope=rope,
            max_positions=max_positions(text, rope),
            eos_ids=_eos_ids(config, text, generation),
            stored_dtype=_stored_dtype(text),
            layer_types=layer_types,
            linear=read_linear_spec(text) if LINEAR in layer_types else None,
        )

    @property
    def is_hybrid_family(self) -> bool:
        """Norms are zero-centred and attention's output is gated."""
        return self.architecture in HYBRIDS

    @property
    def num_full_layers(self) -> int:
        """Layers with keys and values."""
        return self.layer_types.count(FULL)

    @property
    def num_linear_layers(self) -> int:
        """Layers with a recurrent state."""
        return self.layer_types.count(LINEAR)

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    def resolve_dtype(self, dtype: str) -> str:
        """auto becomes the checkpoint's dtype. Raises ValueError if there is none or it is not supported."""
        name = self.stored_dtype if dtype == "auto" else dtype
        if not name:
            raise ValueError("config.json names no dtype; say bfloat16 or float32")
        if name not in DTYPE_BYTES:
            raise ValueError(f"dtype {name!r} is not supported; supported are auto, {', '.join(DTYPE_BYTES)}")
        return name


def kind_specs(
    shape: TargetShape,
    page_size: int,
    dtype: str,
    block_size: int = 1,
    kv_cache_dtype: str = AUTO,
    state_dtype: str = "float32",
) -> list[KindSpec]:
    """The kinds this target needs. block_size: rows of a verify block, which the rings have to hold twice.

    A page of target_kv holds page_size tokens of all FULL layers, in kv_cache_dtype (one of KV_CACHE_DTYPES); one of
    state or ring belongs to one LINEAR layer of one request, a state in state_dtype (one of STATE_DTYPES).
    """
    item = DTYPE_BYTES[shape.resolve_dtype(dtype)]
    token_bytes = shape.num_full_layers * 2 * shape.num_kv_heads * shape.head_dim * kv_item_bytes(kv_cache_dtype, item)
    kinds = [KindSpec(name=TARGET_KV, page_bytes=page_size * token_bytes, tokens_per_page=page_size)]
    if shape.linear is None:
        return kinds
    state_bytes = shape.linear.state_bytes(item, state_dtype)
    ring_bytes = shape.linear.ring_bytes(ring_page_rows(page_size, block_size), item)
    per_req = shape.num_linear_layers
    return [
        *kinds,
        KindSpec(name=STATE, page_bytes=state_bytes, tokens_per_page=0, pages_per_req=per_req, is_state=True),
        KindSpec(name=RING, page_bytes=ring_bytes, tokens_per_page=0, pages_per_req=per_req * RING_PAGES),
    ]


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return name
    what = "a mixture of experts" if any("Moe" in str(name) for name in names) else "not supported"
    raise ValueError(f"architectures {names} is {what}; supported are {', '.join(ARCHITECTURES)}")


def _biases(architecture: str, config: dict[str, Any]) -> dict[str, bool]:
    is_qwen2, attention = architecture == "Qwen2ForCausalLM", get_bool(config, "attention_bias", False)
    return {
        "qkv_bias": is_qwen2 or attention,
        "o_bias": attention and not is_qwen2,
        "mlp_bias": get_bool(config, "mlp_bias", False) and architecture == "LlamaForCausalLM",
    }


def _refuse_unsupported(config: dict[str, Any], text: dict[str, Any]) -> None:
    check_quantization(config.get("quantization_config"))
    check_quantization(text.get("quantization_config"))
    # Qwen3-Next has 512 experts where its config names no number.
    experts = text.get("num_experts", 512 if "Qwen3NextForCausalLM" in config["architectures"] else 0)
    if experts:
        raise ValueError(f"num_experts is {experts}; mixtures of experts are not supported")
    if text.get("attn_output_gate") is False:
        raise ValueError("attn_output_gate is false; attention without its gate is not supported")
    gate = text.get("output_gate_type") or "silu"
    if gate not in ("silu", "swish"):
        raise ValueError(f"output_gate_type is {gate!r}; the gate of linear layers must be silu")
    sliding = text.get("use_sliding_window") and text.get("sliding_window")
    if sliding and not text.get("layer_types"):
        sliding = get_int(text, "num_hidden_layers") > (text.get("max_window_layers") or 0)
        if sliding:
            raise ValueError(
                f"sliding_window {text['sliding_window']} is not supported; the target's layers must all be {FULL}"
            )


def _eos_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError(f"eos_token_id must be token ids, got {sorted(map(str, ids))}")
    return tuple(sorted(ids))


def _stored_dtype(config: dict[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or ""
    return str(name).removeprefix("torch.")
