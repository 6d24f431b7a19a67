"""From a folder's tensors to the layers that only hybrids have: gated delta net, and attention with a gate."""

import torch

from memsvc.device.layers import GatedRMSNorm, Linear
from target_worker.model.delta_layer import DeltaLayer
from target_worker.model.linear_spec import LinearSpec
from target_worker.model.named import Named


def delta_layer(named: Named, spec: LinearSpec) -> DeltaLayer:
    """The gated delta net layer of that prefix."""
    hidden, float32 = named.shape.hidden_size, torch.float32
    parts = _fused(named, spec) if named.has("linear_attn.in_proj_qkvz.weight") else _separate(named, spec)
    norm = named.get("linear_attn.norm.weight", spec.v_dim)
    conv = named.get("linear_attn.conv1d.weight", spec.conv_dim, 1, spec.conv_kernel, dtype=float32)
    return DeltaLayer(
        spec=spec,
        input_norm=named.norm("input_layernorm", hidden),
        proj=Linear(torch.cat([*parts[:-2], *(_widened(part, spec) for part in parts[-2:])])).pack(),
        conv=conv[:, 0].t().contiguous(),
        rate=_widened(-named.get("linear_attn.A_log", spec.num_v_heads, dtype=float32).exp(), spec),
        dt_bias=_widened(named.get("linear_attn.dt_bias", spec.num_v_heads, dtype=float32), spec),
        norm=GatedRMSNorm(norm, named.shape.rms_norm_eps),
        o=named.linear({"linear_attn.out_proj": hidden}, spec.value_size),
        post_norm=named.norm("post_attention_layernorm", hidden),
        mlp=named.mlp(),
    )


def gated_qkv(named: Named) -> Linear:
    """q, k, v and the output gate as one matrix. In the checkpoint each head's gate follows its query."""
    shape = named.shape
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim

    def stacked(what: str, *num_in: int) -> torch.Tensor:
        pairs = named.get(f"self_attn.q_proj.{what}", heads * 2 * dim, *num_in).view(heads, 2, dim, *num_in)
        q, gate = pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1)
        k, v = (named.get(f"self_attn.{name}.{what}", kv_heads * dim, *num_in) for name in ("k_proj", "v_proj"))
        return torch.cat((q, k, v, gate))

    return Linear(stacked("weight", shape.hidden_size), stacked("bias") if shape.qkv_bias else None).pack()


def _widened(x: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    """x [v_heads, ...] with zeros up to gate_width."""
    return torch.cat((x, x.new_zeros((spec.gate_width - len(x), *x.shape[1:]))))


def _separate(named: Named, spec: LinearSpec) -> list[torch.Tensor]:
    """Queries, keys and values; z; b; a."""
    sizes = {"qkv": spec.conv_dim, "z": spec.value_size, "b": spec.num_v_heads, "a": spec.num_v_heads}
    hidden = named.shape.hidden_size
    return [named.get(f"linear_attn.in_proj_{name}.weight", size, hidden) for name, size in sizes.items()]


def _fused(named: Named, spec: LinearSpec) -> list[torch.Tensor]:
    """The same from Qwen3-Next's two matrices, which have all parts of a key head together."""
    hidden, heads, group = named.shape.hidden_size, spec.num_k_heads, spec.num_v_heads // spec.num_k_heads

    def split(name: str, *sizes: int) -> list[torch.Tensor]:
        weight = named.get(f"linear_attn.{name}.weight", heads * sum(sizes), hidden)
        parts = weight.view(heads, sum(sizes), hidden).split(sizes, dim=1)
        return [part.flatten(0, 1) for part in parts]

    wide = group * spec.v_dim
    return [*split("in_proj_qkvz", spec.k_dim, spec.k_dim, wide, wide), *split("in_proj_ba", group, group)]
