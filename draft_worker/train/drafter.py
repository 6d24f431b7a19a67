"""A drafter as named parameters: its config.json, its first weights, and the serving network made of them."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from draft_worker.borrowed import Borrowed
from draft_worker.conv import LocalConv
from draft_worker.model import DraftLayer, DraftModel
from draft_worker.selector import CandidateSelector
from draft_worker.shape import DraftShape
from draft_worker.train.config import V1, V2, DrafterConfig
from draft_worker.train.fused_draft import FusedDraftLayer, FusedNorm
from memsvc.device.layers import GatedMlp, Linear, RMSNorm, Rotary, activation
from target_worker.model.config import TargetShape

Tensors = Mapping[str, torch.Tensor]
"""By the names of the published layout."""

_STD = 0.02
_FIRST_TAP = 1 / 15
"""Depth of the first tap as a share of the target; the last lies three from the end."""
_DRAFT_EPS = 1e-6


def drafter_json(config: DrafterConfig, target: TargetShape, draft_vocab_size: int, dtype: str) -> dict[str, Any]:
    """config.json of the drafter for a target. Raises ValueError if the two do not fit."""
    nested: dict[str, Any] = {
        "block_size": config.block_rows,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps or spread_taps(config.num_taps, target.num_layers)),
    }
    if config.version == V2:
        nested |= {"conv_kernel_size": config.conv_taps, "conv_group_size": config.conv_group}
        nested |= {"selector_rank": config.rank, "selector_top_k": config.top_k}
    kind = "sliding_attention" if config.window else "full_attention"
    made = {
        "architectures": ["DFlashDraftModel" if config.version == V1 else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": dtype,
        "hidden_size": target.hidden_size,
        "intermediate_size": config.mlp_width or target.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": _DRAFT_EPS,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": target.max_positions,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": target.rope.theta,
        "layer_types": [kind] * config.layers,
        "is_causal": False,
        "num_target_layers": target.num_layers,
        "dflash_config": nested,
    } | ({"sliding_window": config.window} if config.window else {})
    DraftShape.from_json(made)
    return made


def spread_taps(num_taps: int, depth: int) -> tuple[int, ...]:
    """Layers to tap, evenly from near the bottom to the third from the top."""
    if num_taps > depth:
        raise ValueError(f"{num_taps} taps of a target of {depth} layers")
    last = max(depth - 3, num_taps - 1)
    first = min(round(depth * _FIRST_TAP), last - num_taps + 1)
    return tuple(round(first + index * (last - first) / max(1, num_taps - 1)) for index in range(num_taps))


def parameter_sizes(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Name and size of every trained tensor."""
    hidden, dim, width = shape.hidden_size, shape.head_dim, shape.intermediate_size
    q_rows, kv_rows = shape.num_heads * dim, shape.num_kv_heads * dim
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, shape.feature_width),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
    }
    if shape.has_conv:
        taps, groups = shape.conv_kernel_size, hidden // shape.conv_group_size
        for part in ("attention_conv", "mlp_conv"):
            layer[f"{part}.base_kernel"] = (2, taps, hidden)
            layer[f"{part}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    for index in range(shape.num_layers):
        sizes |= {f"layers.{index}.{name}": size for name, size in layer.items()}
    if shape.has_selector:
        sizes["candidate_selector.hidden_projection.weight"] = (shape.selector_rank, hidden)
        for part in ("predecessor", "successor"):
            sizes[f"candidate_selector.{part}_codebook"] = (shape.vocab_size, shape.selector_rank)
    return sizes


def first_weights(shape: DraftShape, seed: int) -> dict[str, torch.Tensor]:
    """Fresh float32 parameters: convolutions are the identity, and the selector adds nothing to the logits."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, size in parameter_sizes(shape).items():
        tensor = torch.randn(size, generator=generator)
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        elif name.endswith("base_kernel"):
            tensor.zero_()[:, 0] = 1
        elif name.endswith(("kernel_projection.weight", "successor_codebook")):
            tensor.zero_()
        elif name.endswith("hidden_projection.weight"):
            tensor /= math.sqrt(size[1])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= _STD / math.sqrt(2 * shape.num_layers)
        elif not name.endswith("codebook"):
            tensor *= _STD
        made[name] = tensor
    return made


def assemble(
    shape: DraftShape, tensors: Tensors, borrowed: Borrowed, draft_to_target: torch.Tensor | None
) -> DraftModel:
    """The serving network over these tensors, all of one dtype. Gradients flow back into them.

    Matrices stay as they are: the layout that serving packs them into for a CPU has no gradient.
    """
    device = str(borrowed.embedding.device)
    norm = _norms(shape, tensors)
    per_layer = [_kv(tensors, index) for index in range(shape.num_layers)]
    k_norms = [tensors[f"layers.{index}.self_attn.k_norm.weight"] for index in range(shape.num_layers)]
    return DraftModel(
        shape=shape,
        layers=tuple(_layer(shape, tensors, index) for index in range(shape.num_layers)),
        rotary=Rotary(shape.rope, device),
        feature_proj=Linear(tensors["fc.weight"]),
        feature_norm=norm("hidden_norm"),
        context_kv=Linear(torch.cat(per_layer)),
        context_k_norm=FusedNorm(torch.stack(k_norms)[:, None], shape.rms_norm_eps),
        norm=norm("norm"),
        embedding=borrowed.embedding,
        mask_row=borrowed.embedding[shape.mask_token_id].clone(),
        head=borrowed.head if draft_to_target is None else borrowed.head[draft_to_target],
        draft_to_target=draft_to_target,
        selector=_selector(tensors) if shape.has_selector else None,
    )


def _norms(shape: DraftShape, tensors: Tensors, prefix: str = "") -> Any:
    return lambda name: FusedNorm(tensors[f"{prefix}{name}.weight"], shape.rms_norm_eps)


def _kv(tensors: Tensors, index: int) -> torch.Tensor:
    name = f"layers.{index}.self_attn."
    return torch.cat([tensors[f"{name}k_proj.weight"], tensors[f"{name}v_proj.weight"]])


def _layer(shape: DraftShape, tensors: Tensors, index: int) -> DraftLayer:
    name = f"layers.{index}."
    norm = _norms(shape, tensors, name)
    q_norm, k_norm = tensors[f"{name}self_attn.q_norm.weight"], tensors[f"{name}self_attn.k_norm.weight"]
    qk_norm = torch.cat([q_norm.expand(shape.num_heads, -1), k_norm.expand(shape.num_kv_heads, -1)])
    gate_up = torch.cat([tensors[f"{name}mlp.gate_proj.weight"], tensors[f"{name}mlp.up_proj.weight"]])
    return FusedDraftLayer(
        shape=shape,
        input_norm=norm("input_layernorm"),
        qkv=Linear(torch.cat([tensors[f"{name}self_attn.q_proj.weight"], _kv(tensors, index)])),
        qk_norm=RMSNorm(qk_norm, shape.rms_norm_eps),
        out=Linear(tensors[f"{name}self_attn.o_proj.weight"]),
        post_norm=norm("post_attention_layernorm"),
        mlp=GatedMlp(Linear(gate_up), Linear(tensors[f"{name}mlp.down_proj.weight"]), activation("silu")),
        attention_conv=_conv(shape, tensors, f"{name}attention_conv."),
        mlp_conv=_conv(shape, tensors, f"{name}mlp_conv."),
        sink=None,
    )


def _conv(shape: DraftShape, tensors: Tensors, name: str) -> LocalConv | None:
    if not shape.has_conv:
        return None
    return LocalConv(tensors[f"{name}base_kernel"], Linear(tensors[f"{name}kernel_projection.weight"]))


def _selector(tensors: Tensors) -> CandidateSelector:
    name = "candidate_selector."
    return CandidateSelector(
        hidden_projection=tensors[f"{name}hidden_projection.weight"],
        predecessor=tensors[f"{name}predecessor_codebook"],
        successor=tensors[f"{name}successor_codebook"],
    )
