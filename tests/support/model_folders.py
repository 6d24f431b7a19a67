"""Folders that hold nothing but a config.json: enough to plan a launch."""

import json
from pathlib import Path
from typing import Any

from launch.config import LaunchConfig
from launch.models import Models, read_models

# Shaped as SmolLM2-135M, so that the numbers can be checked by hand: 30 * 2 * 3 * 64 * 2 = 23,040 bytes a token.
TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576,
    "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 2,
}  # fmt: skip
DRAFT = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 576,
    "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "vocab_size": 49152, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "block_size": 8,
    "num_target_layers": 30, "torch_dtype": "bfloat16", "rope_theta": 100000.0,
    "dflash_config": {"mask_token_id": 16, "target_layer_ids": [1, 14, 27]},
}  # fmt: skip

# Shaped as the 27B hybrid: 48 of 64 layers are linear, 64 KiB of KV a token in the other 16.
HYBRID = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
    "tie_word_embeddings": False, "vision_config": {"depth": 27},
    "text_config": {
        "model_type": "qwen3_5_text", "num_hidden_layers": 64, "full_attention_interval": 4, "hidden_size": 5120,
        "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 248320, "dtype": "bfloat16",
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "eos_token_id": 248044, "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
}  # fmt: skip


def folder(path: Path, config: dict[str, Any], **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def models_of(tmp_path: Path, config: LaunchConfig, **draft_changes: Any) -> Models:
    if config.draft_model_path:
        folder(Path(config.draft_model_path), DRAFT, **draft_changes)
    return read_models(config, folder(tmp_path / "target", TARGET))


def with_draft(tmp_path: Path, **settings: Any) -> LaunchConfig:
    return LaunchConfig(draft_model_path=str(tmp_path / "draft"), **settings)
