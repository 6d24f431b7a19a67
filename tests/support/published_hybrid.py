"""The layout in which Qwen3.8-27B is published: its config.json, and name and shape of every tensor.

Written down from the published folder, and from nothing of this project: 1199 tensors in bfloat16 in 18 files.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from memsvc.device.shards import write_shards

Sizes = dict[str, tuple[int, ...]]

TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": 248044,
    "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17408,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_hidden_layers": 64,
    "num_key_value_heads": 4, "output_gate_type": "swish", "pad_token_id": None, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip
VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
    "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_5_vision",
    "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 5120, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053,
    "vision_end_token_id": 248054, "text_config": TEXT, "vision_config": VISION,
}  # fmt: skip


def text_sizes(config: dict[str, Any]) -> Sizes:
    """The language model and its head."""
    text = config["text_config"]
    root, hidden, vocab = "model.language_model.", text["hidden_size"], text["vocab_size"]
    sizes: Sizes = {f"{root}embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    sizes[f"{root}norm.weight"] = (hidden,)
    for i, kind in enumerate(text["layer_types"]):
        mixer = _full(text) if kind == "full_attention" else _linear(text)
        sizes |= _below(f"{root}layers.{i}.", mixer | _rest_of_layer(text))
    return sizes


def mtp_sizes(config: dict[str, Any]) -> Sizes:
    """The head for several tokens: one layer with full attention, and what joins it to the language model."""
    text = config["text_config"]
    hidden = text["hidden_size"]
    norms = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
    own: Sizes = {"fc.weight": (hidden, 2 * hidden)} | dict.fromkeys(norms, (hidden,))
    return _below("mtp.", own | _below("layers.0.", _full(text) | _rest_of_layer(text)))


def vision_sizes(config: dict[str, Any]) -> Sizes:
    """The vision tower."""
    vision = config["vision_config"]
    hidden, wide, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    conv = (hidden, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    sizes: Sizes = {
        "patch_embed.proj.weight": conv, "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (vision["num_position_embeddings"], hidden),
        **_biased("merger.linear_fc1", merged, merged), **_biased("merger.linear_fc2", vision["out_hidden_size"], merged),
        "merger.norm.weight": (hidden,), "merger.norm.bias": (hidden,),
    }  # fmt: skip
    block: Sizes = {f"norm{i}.{part}": (hidden,) for i in (1, 2) for part in ("weight", "bias")}
    block |= _biased("attn.qkv", 3 * hidden, hidden) | _biased("attn.proj", hidden, hidden)
    block |= _biased("mlp.linear_fc1", wide, hidden) | _biased("mlp.linear_fc2", hidden, wide)
    for i in range(vision["depth"]):
        sizes |= _below(f"blocks.{i}.", block)
    return _below("model.visual.", sizes)


def sizes(config: dict[str, Any]) -> Sizes:
    """All of the checkpoint."""
    return text_sizes(config) | mtp_sizes(config) | vision_sizes(config)


def num_parameters(sizes: Mapping[str, Iterable[int]]) -> int:
    """Numbers in all of them."""
    return sum(math.prod(size) for size in sizes.values())


def write_published(folder: Path, config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """The folder, its weights in several files with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    files = write_shards(folder, tensors, 1 << 17)
    assert len(files) > 1
    return folder


def _full(text: dict[str, Any]) -> Sizes:
    hidden, dim = text["hidden_size"], text["head_dim"]
    q_size, kv_size = text["num_attention_heads"] * dim, text["num_key_value_heads"] * dim
    return _below("self_attn.", {
        "q_proj.weight": (2 * q_size, hidden), "k_proj.weight": (kv_size, hidden), "v_proj.weight": (kv_size, hidden),
        "o_proj.weight": (hidden, q_size), "q_norm.weight": (dim,), "k_norm.weight": (dim,),
    })  # fmt: skip


def _linear(text: dict[str, Any]) -> Sizes:
    hidden, v_heads, v_dim = text["hidden_size"], text["linear_num_value_heads"], text["linear_value_head_dim"]
    v_size = v_heads * v_dim
    channels = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + v_size
    return _below("linear_attn.", {
        "in_proj_qkv.weight": (channels, hidden), "in_proj_z.weight": (v_size, hidden),
        "in_proj_a.weight": (v_heads, hidden), "in_proj_b.weight": (v_heads, hidden),
        "conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]), "A_log": (v_heads,), "dt_bias": (v_heads,),
        "norm.weight": (v_dim,), "out_proj.weight": (hidden, v_size),
    })  # fmt: skip


def _rest_of_layer(text: dict[str, Any]) -> Sizes:
    hidden, wide = text["hidden_size"], text["intermediate_size"]
    return {
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden), "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }  # fmt: skip


def _biased(name: str, num_out: int, num_in: int) -> Sizes:
    return {f"{name}.weight": (num_out, num_in), f"{name}.bias": (num_out,)}


def _below(prefix: str, sizes: Sizes) -> Sizes:
    return {prefix + name: size for name, size in sizes.items()}
