"""Shapes of drafters that are measured with random weights, and the least that a propose of them can take."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_worker.shape import DraftShape

BYTES_PER_S = 4.3e12
FLOPS_PER_S = 790e12
"""What an H200 reaches in bfloat16 (measured): long reads, and large GEMMs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Two config.json files."""

    target: dict[str, Any]
    """As much of it as a drafter reads."""
    drafter: dict[str, Any]
    rows: tuple[int, ...]
    """Rows a request (B) that are measured if nobody says otherwise."""

    def write(self, folder: Path, block_size: int) -> DraftShape:
        """Both folders, target and drafter, with blocks of so many rows; the drafter's shape."""
        flash = self.drafter["dflash_config"] | {"block_size": block_size}
        for name, config in (("target", self.target), ("drafter", self.drafter | {"dflash_config": flash})):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return DraftShape.from_folder(folder / "drafter")


def _target(hidden: int, depth: int, vocab: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_hidden_layers": depth, "vocab_size": vocab, "tie_word_embeddings": False}


def _drafter(hidden: int, inner: int, vocab: int, flash: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "vocab_size": vocab, "dtype": "bfloat16", "dflash_config": flash,
    } | more  # fmt: skip


GEOMETRIES = {
    "qwen38-27b-dflash2": Geometry(
        target=_target(5120, 64, 248320),
        drafter=_drafter(
            5120, 17408, 248320,
            {"mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61], "conv_kernel_size": 2,
             "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
            architectures=["DFlash2DraftModel"], rope_theta=1e7, is_causal=False, sliding_window=2048,
            layer_types=["sliding_attention"] * 5, max_position_embeddings=262144,
        ),
        rows=(9, 8),
    ),
    "qwen35-27b-dflash": Geometry(
        target=_target(5120, 64, 248320),
        drafter=_drafter(
            5120, 17408, 248320, {"mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61]},
            rope_theta=1e7, max_position_embeddings=262144,
        ),
        rows=(9,),
    ),
    "qwen3-8b-dflash": Geometry(
        target=_target(4096, 36, 151936),
        drafter=_drafter(
            4096, 12288, 151936, {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
            rope_theta=1e6, max_position_embeddings=40960,
        ),
        rows=(9,),
    ),
    "tiny-dflash2": Geometry(
        target=_target(64, 4, 512),
        drafter=_drafter(
            64, 96, 512,
            {"mask_token_id": 500, "target_layer_ids": [1, 2], "conv_kernel_size": 2, "conv_group_size": 16,
             "selector_rank": 16, "selector_top_k": 8},
            architectures=["DFlash2DraftModel"], rope_theta=1e5, is_causal=False, sliding_window=64,
            layer_types=["sliding_attention"] * 2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, dtype="float32",
        ),
        rows=(4,),
    ),
}  # fmt: skip
"""The last one is for tests: everything is there, and nothing is large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """What has to be read and computed once for one propose, in bytes and floating point operations."""

    weight_bytes: float
    """Layers, fc and context K/V projections, head."""
    kv_bytes: float
    """Context of all requests in all layers."""
    flops: float

    @property
    def us(self) -> float:
        """Whichever of the two takes longer, in microseconds."""
        return max((self.weight_bytes + self.kv_bytes) / BYTES_PER_S, self.flops / FLOPS_PER_S) * 1e6


def floor_of(shape: DraftShape, num_reqs: int, context: int, item_bytes: int = 2) -> Floor:
    """For num_reqs blocks of shape.block_size rows with context tokens each: head on rows 1 and on, paged attention."""
    hidden, dim, size = shape.hidden_size, shape.head_dim, shape.block_size
    q_width, kv_width = shape.num_heads * dim, 2 * shape.num_kv_heads * dim
    layer = hidden * (2 * q_width + kv_width + 3 * shape.intermediate_size)
    if shape.has_conv:
        # Two projections, each to both sides' taps.
        layer += 2 * hidden * 2 * shape.conv_kernel_size * (hidden // shape.conv_group_size)
    once = shape.num_layers * layer + hidden * (shape.feature_width + shape.num_layers * kv_width)
    head = hidden * (shape.draft_vocab_size + shape.selector_rank)
    seen = [min(context, layer.window) if layer.window else context for layer in shape.layers]
    attention = sum(4 * num_reqs * size * (tokens + size) * q_width for tokens in seen)
    return Floor(
        weight_bytes=item_bytes * (once + head),
        kv_bytes=item_bytes * num_reqs * kv_width * sum(seen),
        flops=2 * num_reqs * (size * once + (size - 1) * head) + attention,
    )
