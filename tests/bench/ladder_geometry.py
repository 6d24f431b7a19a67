"""Whole servers that are measured with random weights: a target, its drafter, and what another engine gave."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.propose_geometry import GEOMETRIES
from tests.support.wide_tokenizer import write_wide_tokenizer

PEER = "vLLM 0.26.0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """What is served, and how long requests are."""

    target: dict[str, Any]
    """Its config.json."""
    drafter: str
    """Name in propose_geometry.GEOMETRIES."""
    num_drafts: int
    """k"""
    prompt_tokens: int = 1024
    max_tokens: int = 512
    peer: Mapping[int, float] = field(default_factory=dict)
    """Output tokens a second of PEER on an H200 by concurrency: the same geometry, lengths and acceptance."""

    @property
    def vocab_size(self) -> int:
        """Token ids below this are prompts."""
        return self.target["vocab_size"]

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Folders of target, tokenizer included, and drafter."""
        target, drafter = folder / "target", folder / "drafter"
        GEOMETRIES[self.drafter].write(folder, 1 + self.num_drafts)
        (target / "config.json").write_text(json.dumps(self.target), encoding="utf-8")
        write_wide_tokenizer(target, self.vocab_size)
        return target, drafter


def _qwen3(**sizes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16",
    } | sizes  # fmt: skip


def _qwen35_27b() -> dict[str, Any]:
    """48 layers with a gated delta net, and 16 with full attention."""
    full = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "attn_output_gate": True,
        "dtype": "bfloat16", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144, "rope_parameters": full, "eos_token_id": 248046,
    }  # fmt: skip


def _tiny_hybrid() -> dict[str, Any]:
    return _qwen35_27b() | {
        "dtype": "float32", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
        "max_position_embeddings": 2048, "eos_token_id": 2,
    }  # fmt: skip


_PEER_27B = {1: 195.3, 2: 298.2, 4: 672.6, 8: 991.8, 16: 1452.9, 32: 1842.8}

LADDERS = {
    "qwen3-8b-dflash": Ladder(
        target=_qwen3(
            hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960, eos_token_id=151645,
        ),
        drafter="qwen3-8b-dflash",
        num_drafts=8,
        peer={1: 593.2, 2: 1144.6, 4: 2085.2, 8: 3631.7, 16: 5654.3, 32: 7015.2},
    ),
    "qwen35-27b-dflash": Ladder(
        target=_qwen35_27b(), drafter="qwen35-27b-dflash", num_drafts=8, peer=_PEER_27B
    ),
    # The peer has another drafter here, of the same size.
    "qwen38-27b-dflash2": Ladder(
        target=_qwen35_27b(), drafter="qwen38-27b-dflash2", num_drafts=8, peer=_PEER_27B
    ),
    "tiny": Ladder(
        target=_qwen3(
            hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=512, max_position_embeddings=2048, eos_token_id=2, torch_dtype="float32",
        ),
        drafter="tiny-dflash2",
        num_drafts=3,
        prompt_tokens=40,
        max_tokens=24,
    ),
    "tiny-hybrid": Ladder(
        target=_tiny_hybrid(), drafter="tiny-dflash2", num_drafts=3, prompt_tokens=40, max_tokens=24
    ),
}  # fmt: skip
"""The tiny ones are for tests and for the CPU: everything is there, and nothing is large."""
