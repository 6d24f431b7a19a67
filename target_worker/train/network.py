"""The embedded hybrid model in training: functions of parameters that have their Hugging Face names.

It computes what transformers' Qwen3_5ForCausalLM computes and what target_worker/model serves. Own functions, because
the convolution and the elementwise chains of a layer, one kernel each elsewhere, are what a step of a model this
small consists of: here they can be compiled as one.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from target_worker.train.config import NetworkConfig
from target_worker.train.delta import chunked_delta_rule
from target_worker.train.fused import Fused

Params = Mapping[str, torch.Tensor]

_WRITING = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
_NUM_MLP = 4
"""Weights of a layer's MLP, its norm in front; they come last."""
_O_PROJ = 4
"""Place of attention's output projection among a layer's weights."""
_ENTERING = 7
"""Weights that enter a gated delta net."""


def first_params(config: NetworkConfig, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Parameters to start from, float32, by name.

    Matrices are normal with deviation 0.02, those that write into the residual stream smaller by the square root of
    their number; the decay of a state is spread from a few to a thousand tokens, as by Mamba's authors (2023).
    """
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for name, form in forms(config).items():
        if name.endswith("A_log"):
            tensor = torch.empty(form).uniform_(1, 16, generator=generator).log()
        elif name.endswith("dt_bias"):
            step = torch.empty(form).uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp()
            tensor = step + torch.log(-torch.expm1(-step))
        elif name.endswith("conv1d.weight"):
            tensor = torch.empty(form).uniform_(-0.5, 0.5, generator=generator)
        elif len(form) == 1:
            tensor = torch.ones(form) if name.endswith("linear_attn.norm.weight") else torch.zeros(form)
        else:
            scale = (2 * config.layers) ** -0.5 if name.endswith(_WRITING) else 1.0
            tensor = torch.empty(form).normal_(0, 0.02 * scale, generator=generator)
        made[name] = tensor.to(device).requires_grad_()
    return made


def forms(config: NetworkConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every parameter."""
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, config.hidden)}
    for layer in range(config.layers):
        made |= {f"model.layers.{layer}.{name}": form for name, form in _layer_forms(config, layer).items()}
    return made | {"model.norm.weight": (config.hidden,)}


def _layer_forms(config: NetworkConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Those of a layer: what enters the mixer, what leaves it, the MLP. The functions below take them in this order."""
    hidden, mlp = config.hidden, config.mlp_width
    mixer = _full_forms(config) if config.is_full(layer) else _linear_forms(config)
    return {"input_layernorm.weight": (hidden,)} | mixer | {
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }  # fmt: skip


def _full_forms(config: NetworkConfig) -> dict[str, tuple[int, ...]]:
    hidden, dim = config.hidden, config.head_dim
    return {
        "self_attn.q_proj.weight": (2 * config.heads * dim, hidden),
        "self_attn.k_proj.weight": (config.kv_heads * dim, hidden),
        "self_attn.v_proj.weight": (config.kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, config.heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _linear_forms(config: NetworkConfig) -> dict[str, tuple[int, ...]]:
    hidden, num = config.hidden, config.linear_v_heads
    value = num * config.linear_dim
    return {
        "linear_attn.in_proj_qkv.weight": (config.conv_dim, hidden),
        "linear_attn.in_proj_a.weight": (num, hidden),
        "linear_attn.in_proj_b.weight": (num, hidden),
        "linear_attn.conv1d.weight": (config.conv_dim, 1, config.conv_kernel),
        "linear_attn.dt_bias": (num,),
        "linear_attn.A_log": (num,),
        "linear_attn.in_proj_z.weight": (value, hidden),
        "linear_attn.norm.weight": (config.linear_dim,),
        "linear_attn.out_proj.weight": (hidden, value),
    }


def hidden_states(config: NetworkConfig, params: Params, tokens: torch.Tensor) -> torch.Tensor:
    """[n, T, hidden] after the final norm, of n sequences int64 [n, T]; T is a multiple of 64."""
    x = F.embedding(tokens, params["model.embed_tokens.weight"])
    tables = rotary_tables(config, tokens.shape[1], x)
    for layer in range(config.layers):
        own = [params[f"model.layers.{layer}.{name}"] for name in _layer_forms(config, layer)]
        mlp = own[-_NUM_MLP:]
        if config.is_full(layer):
            q, k, v, gate = _enter_attention(x, *tables, config, *own[:-_NUM_MLP])
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = _leave_attention(out, gate, x, config, own[_O_PROJ], *mlp)
        else:
            out = chunked_delta_rule(*_enter_delta(x, config, *own[:_ENTERING]))
            x = _leave_delta(out, x, config, own[0], *own[_ENTERING:])
    return zero_centred_norm(x, params["model.norm.weight"], config.norm_eps)


def rotary_tables(config: NetworkConfig, num: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [num, rotary_dim / 2] of positions 0 to num - 1, in the dtype of `like`."""
    powers = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=like.device) / config.rotary_dim
    angles = torch.arange(num, dtype=torch.float32, device=like.device)[:, None] * config.rope_theta**-powers
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def zero_centred_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm in float32 with the factor 1 + weight."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())
    return y.to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [n, T, heads, d], of which the first part is rotated, its halves being the pairs."""
    half = cos.shape[-1]
    one, two, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((one * cos - two * sin, two * cos + one * sin, rest), dim=-1)


def enter_attention(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, config: NetworkConfig, *weights: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """q [n, heads, T, d], k, v [n, kv_heads, T, d] and the gate [n, T, heads, d] of the stream x [n, T, hidden]."""
    norm, q_proj, k_proj, v_proj, _, q_norm, k_norm = weights
    n, num, _ = x.shape
    y = zero_centred_norm(x, norm, config.norm_eps)
    q, gate = F.linear(y, q_proj).view(n, num, config.heads, -1).chunk(2, dim=-1)
    k, v = (F.linear(y, weight).view(n, num, config.kv_heads, -1) for weight in (k_proj, v_proj))
    q = rotated(zero_centred_norm(q, q_norm, config.norm_eps), cos, sin)
    k = rotated(zero_centred_norm(k, k_norm, config.norm_eps), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate


def leave_attention(
    out: torch.Tensor,
    gate: torch.Tensor,
    x: torch.Tensor,
    config: NetworkConfig,
    o_proj: torch.Tensor,
    *mlp: torch.Tensor,
) -> torch.Tensor:
    """The stream after a layer that attends, of attention's output [n, heads, T, d]."""
    out = (out.transpose(1, 2) * gate.sigmoid()).flatten(2)
    return after_mlp(x + F.linear(out, o_proj), config, *mlp)


def enter_delta(x: torch.Tensor, config: NetworkConfig, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, v, g and beta of a gated delta net layer, float32, as chunked_delta_rule takes them."""
    norm, qkv, a_proj, b_proj, conv, dt_bias, a_log = weights
    y = zero_centred_norm(x, norm, config.norm_eps)
    padded = F.pad(F.linear(y, qkv).float(), (0, 0, config.conv_kernel - 1, 0))
    num = x.shape[1]
    mixed = sum(padded[:, place : place + num] * conv[:, 0, place].float() for place in range(config.conv_kernel))
    keys = config.linear_k_heads * config.linear_dim
    q, k, v = (
        part.unflatten(-1, (-1, config.linear_dim))
        for part in F.silu(torch.as_tensor(mixed)).split(
            [keys, keys, config.linear_v_heads * config.linear_dim], dim=-1
        )
    )
    a, b = (F.linear(y, weight).float() for weight in (a_proj, b_proj))
    return q, k, v, -a_log.float().exp() * F.softplus(a + dt_bias.float()), b.sigmoid()


def leave_delta(out: torch.Tensor, x: torch.Tensor, config: NetworkConfig, *weights: torch.Tensor) -> torch.Tensor:
    """The stream after a gated delta net layer, of the rule's outputs [n, T, v_heads, v_dim]."""
    input_norm, z_proj, norm, out_proj, *mlp = weights
    z = F.linear(zero_centred_norm(x, input_norm, config.norm_eps), z_proj)
    z = z.unflatten(-1, (-1, config.linear_dim)).float()
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + config.norm_eps)
    out = (norm.float() * out * F.silu(z)).to(x.dtype)
    return after_mlp(x + F.linear(out.flatten(2), out_proj), config, *mlp)


def after_mlp(x: torch.Tensor, config: NetworkConfig, *weights: torch.Tensor) -> torch.Tensor:
    """The stream after a layer's MLP."""
    norm, gate, up, down = weights
    y = zero_centred_norm(x, norm, config.norm_eps)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


_enter_attention, _leave_attention = Fused(enter_attention, moving=0), Fused(leave_attention, moving=0)
_enter_delta, _leave_delta = Fused(enter_delta, moving=0), Fused(leave_delta, moving=0)
