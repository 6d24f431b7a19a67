"""The tensors of a target's checkpoint: names and shapes from the config alone. No torch: launch imports this file."""

from target_worker.model.config import TargetShape
from target_worker.model.linear_spec import LINEAR, LinearSpec

PLAIN_ROOT = "model."
"""Prefix of the text network's tensors where there is nothing else."""

Form = tuple[int, ...]
"""A tensor's sizes."""


def wanted_tensors(shape: TargetShape, root: str = PLAIN_ROOT, *, is_fused: bool = False) -> dict[str, Form]:
    """Name and shape of every tensor that the target is built from.

    root: prefix of all but the head. is_fused: what a gated delta net layer projects is two matrices instead of four,
    as Qwen3-Next has it.
    """
    hidden = shape.hidden_size
    wanted: dict[str, Form] = {f"{root}embed_tokens.weight": (shape.vocab_size, hidden)}
    for i, kind in enumerate(shape.layer_types):
        layer = _layer(shape, kind == LINEAR, is_fused)
        wanted |= {f"{root}layers.{i}.{name}": form for name, form in layer.items()}
    wanted[f"{root}norm.weight"] = (hidden,)
    if not shape.tie_word_embeddings:
        wanted["lm_head.weight"] = (shape.vocab_size, hidden)
    return wanted


def _layer(shape: TargetShape, is_linear: bool, is_fused: bool) -> dict[str, Form]:
    hidden, width, has_bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
    if is_linear:
        assert shape.linear is not None, f"{shape.layer_types} without sizes"
        mixer = _delta(shape.linear, hidden, is_fused)
    else:
        mixer = _attention(shape)
    return {
        "input_layernorm.weight": (hidden,),
        **mixer,
        "post_attention_layernorm.weight": (hidden,),
        **_projection("mlp.gate_proj", width, hidden, has_bias),
        **_projection("mlp.up_proj", width, hidden, has_bias),
        **_projection("mlp.down_proj", hidden, width, has_bias),
    }


def _attention(shape: TargetShape) -> dict[str, Form]:
    hidden, dim = shape.hidden_size, shape.head_dim
    q_size, kv_size = shape.num_heads * dim, shape.num_kv_heads * dim
    # A gate follows each head's query.
    num_q = q_size * 2 if shape.is_hybrid_family else q_size
    norms: dict[str, Form] = {f"self_attn.{part}_norm.weight": (dim,) for part in ("q", "k") if shape.qk_norm}
    return {
        **_projection("self_attn.q_proj", num_q, hidden, shape.qkv_bias),
        **_projection("self_attn.k_proj", kv_size, hidden, shape.qkv_bias),
        **_projection("self_attn.v_proj", kv_size, hidden, shape.qkv_bias),
        **_projection("self_attn.o_proj", hidden, q_size, shape.o_bias),
        **norms,
    }


def _delta(spec: LinearSpec, hidden: int, is_fused: bool) -> dict[str, Form]:
    heads = spec.num_v_heads
    if is_fused:
        sizes = {"qkvz": spec.conv_dim + spec.value_size, "ba": 2 * heads}
    else:
        sizes = {"qkv": spec.conv_dim, "z": spec.value_size, "b": heads, "a": heads}
    return {
        **{f"linear_attn.in_proj_{part}.weight": (size, hidden) for part, size in sizes.items()},
        "linear_attn.conv1d.weight": (spec.conv_dim, 1, spec.conv_kernel),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (spec.v_dim,),
        "linear_attn.out_proj.weight": (hidden, spec.value_size),
    }


def _projection(name: str, num_out: int, num_in: int, has_bias: bool) -> dict[str, Form]:
    weight: dict[str, Form] = {f"{name}.weight": (num_out, num_in)}
    return weight | {f"{name}.bias": (num_out,)} if has_bias else weight
