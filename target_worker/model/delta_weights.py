"""From a folder's tensors to the layers that only hybrids have: gated delta net, and attention with a gate."""

import torch

from memsvc.device.layers import GatedRMSNorm, Linear
from target_worker.model.delta_layer import DeltaLayer
from target_worker.model.linear_spec import LinearSpec
from target_worker.model.named import Named


def delta_layer(named: Named, spec: LinearSpec) -> DeltaLayer:
    """The gated delta net layer of that prefix."""
    float32 = torch.float32
    parts = _fused(named, spec) if named.wants("linear_attn.in_proj_qkvz.weight") else _separate(named)
    return DeltaLayer(
        spec=spec,
        input_norm=named.norm("input_layernorm"),
        proj=Linear(torch.cat([*parts[:-2], *(_widened(part, spec) for part in parts[-2:])])).pack(),
        conv=named.get("linear_attn.conv1d.weight", float32)[:, 0].t().contiguous(),
        rate=_widened(-named.get("linear_attn.A_log", float32).exp(), spec),
        dt_bias=_widened(named.get("linear_attn.dt_bias", float32), spec),
        norm=GatedRMSNorm(named.get("linear_attn.norm.weight"), named.shape.rms_norm_eps),
        o=named.linear("linear_attn.out_proj"),
        post_norm=named.norm("post_attention_layernorm"),
        mlp=named.mlp(),
    )


def gated_qkv(named: Named) -> Linear:
    """q, k, v and the output gate as one matrix. In the checkpoint each head's gate follows its query."""
    heads, dim = named.shape.num_heads, named.shape.head_dim

    def stacked(what: str) -> torch.Tensor:
        pairs = named.get(f"self_attn.q_proj.{what}").unflatten(0, (heads, 2, dim))
        q, gate = pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1)
        k, v = (named.get(f"self_attn.{name}.{what}") for name in ("k_proj", "v_proj"))
        return torch.cat((q, k, v, gate))

    return Linear(stacked("weight"), stacked("bias") if named.shape.qkv_bias else None).pack()


def _widened(x: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    """x [v_heads, ...] with zeros up to gate_width."""
    return torch.cat((x, x.new_zeros((spec.gate_width - len(x), *x.shape[1:]))))


def _separate(named: Named) -> list[torch.Tensor]:
    """Queries, keys and values; z; b; a."""
    return [named.get(f"linear_attn.in_proj_{name}.weight") for name in ("qkv", "z", "b", "a")]


def _fused(named: Named, spec: LinearSpec) -> list[torch.Tensor]:
    """The same from Qwen3-Next's two matrices, which have all parts of a key head together."""
    heads, group = spec.num_k_heads, spec.num_v_heads // spec.num_k_heads

    def split(name: str, *sizes: int) -> list[torch.Tensor]:
        weight = named.get(f"linear_attn.{name}.weight").unflatten(0, (heads, sum(sizes)))
        return [part.flatten(0, 1) for part in weight.split(sizes, dim=1)]

    wide = group * spec.v_dim
    return [*split("in_proj_qkvz", spec.k_dim, spec.k_dim, wide, wide), *split("in_proj_ba", group, group)]
