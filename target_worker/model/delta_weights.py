"""From a folder's tensors to the layers that only hybrids have: gated delta net, and attention with a gate."""

import torch

from memsvc.device.layers import GatedRMSNorm, Linear
from target_worker.model.delta_layer import DeltaLayer
from target_worker.model.linear_spec import LinearSpec
from target_worker.model.named import Named


def delta_layer(named: Named, spec: LinearSpec) -> DeltaLayer:
    """The gated delta net layer of that prefix."""
    float32 = torch.float32
    return DeltaLayer(
        spec=spec,
        input_norm=named.norm("input_layernorm"),
        proj=_projection(named, spec),
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

    def made(q_gate: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pairs = q_gate.unflatten(0, (heads, 2, dim))
        return torch.cat((pairs[:, 0].flatten(0, 1), k, v, pairs[:, 1].flatten(0, 1)))

    names = [f"self_attn.{part}_proj" for part in "qkv"]
    bias = made(*(named.get(f"{name}.bias") for name in names)) if named.shape.qkv_bias else None
    return named.stacked(made, [named.matrix(name) for name in names], bias)


def _widened(x: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    """x [v_heads, ...] with zeros up to gate_width."""
    return torch.cat((x, x.new_zeros((spec.gate_width - len(x), *x.shape[1:]))))


def _projection(named: Named, spec: LinearSpec) -> Linear:
    """Queries, keys and values; z; b; a, from a matrix each or from two that have all parts of a key head together."""
    is_fused = named.wants("linear_attn.in_proj_qkvz.weight")

    def made(*stored: torch.Tensor) -> torch.Tensor:
        *wide, b, a = _separated(*stored, spec=spec) if is_fused else stored
        return torch.cat((*wide, _widened(b, spec), _widened(a, spec)))

    parts = ("qkvz", "ba") if is_fused else ("qkv", "z", "b", "a")
    return named.stacked(made, [named.matrix(f"linear_attn.in_proj_{part}") for part in parts])


def _separated(qkvz: torch.Tensor, ba: torch.Tensor, *, spec: LinearSpec) -> list[torch.Tensor]:
    """Queries, keys, values, z, b and a of Qwen3-Next's two matrices."""
    heads, group = spec.num_k_heads, spec.num_v_heads // spec.num_k_heads

    def split(weight: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
        return [part.flatten(0, 1) for part in weight.unflatten(0, (heads, sum(sizes))).split(sizes, dim=1)]

    wide = group * spec.v_dim
    return [*split(qkvz, spec.k_dim, spec.k_dim, wide, wide), *split(ba, group, group)]
