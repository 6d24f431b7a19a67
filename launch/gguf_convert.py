"""A llama GGUF file as a Hugging Face folder in bf16, without torch."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from launch.gguf_tokenizer import write_tokenizer
from launch.gguf_weights import HeadCounts, write_safetensors


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """Key-value pairs of a GGUF file, converted when asked for."""

    reader: gguf.GGUFReader

    def __getitem__(self, key: str) -> Any:
        """Raises ValueError naming the key if the file does not have it."""
        field = self.reader.get_field(key)
        if field is None:
            raise ValueError(f"the GGUF file has no key {key!r}")
        return field.contents()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or default if the file does not have it."""
        return self[key] if self.reader.get_field(key) is not None else default


def convert(gguf_path: Path, folder: Path, on_bytes: Callable[[int, int], None]) -> None:
    """Write config.json, generation_config.json, the tokenizer's two files and model.safetensors into folder.

    on_bytes is told (weight bytes written, weight bytes in all). Raises ValueError if the file is
    not a llama model or holds something with no counterpart there.
    """
    reader = gguf.GGUFReader(gguf_path)
    meta = GgufMetadata(reader)
    config = model_config(meta, has_head=any(tensor.name == "output.weight" for tensor in reader.tensors))
    _write_json(folder / "config.json", config)
    roles = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {role: config[role] for role in roles if role in config})
    write_tokenizer(meta, config["max_position_embeddings"], folder)
    heads = HeadCounts(num_heads=config["num_attention_heads"], num_kv_heads=config["num_key_value_heads"])
    write_safetensors(reader, heads, folder / "model.safetensors", on_bytes)


def model_config(meta: GgufMetadata, *, has_head: bool) -> dict[str, Any]:
    """config.json of a llama model. has_head: the file holds an output matrix beside the embedding."""
    if (family := meta["general.architecture"]) != "llama":
        raise ValueError(f"GGUF architecture {family!r}: only 'llama' can be converted")
    num_heads = meta["llama.attention.head_count"]
    hidden = meta["llama.embedding_length"]
    tokens = {
        role: meta.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", num_heads),
        "head_dim": meta.get("llama.rope.dimension_count", hidden // num_heads),
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": _shortest(meta.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": not has_head,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **{role: token_id for role, token_id in tokens.items() if token_id is not None},
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: the file holds 1e-05 as 9.99999974e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
