"""Norm, rotation and MLP give transformers' bits."""

from typing import Any

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as modeling
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from memsvc.device.hf_config import rope_spec
from memsvc.device.layers import (
    GatedMlp,
    GatedRMSNorm,
    Linear,
    RMSNorm,
    Rotary,
    ZeroCentredRMSNorm,
    activation,
)
from memsvc.device.rope import inverse_frequencies

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    YARN,
    {**YARN, "truncate": False},
    {**YARN, "attention_factor": 1.7},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    {**YARN, "beta_fast": 4.0, "beta_slow": 0.5},
    {**YARN, "factor": 1.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    oracle = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    oracle.weight.data.normal_(1.0, 0.3)
    x = (torch.randn(33, 96) * 7).to(dtype)
    got = RMSNorm(oracle.weight.data, 1e-5)(x)
    assert torch.equal(got, oracle(x))
    assert got.dtype == dtype


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_has_the_bits_of_transformers(rope: dict[str, Any], dtype: torch.dtype) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 2e4, **rope},
    )
    spec = rope_spec({"max_position_embeddings": 2048, "rope_theta": 2e4, "rope_scaling": rope}, 64)
    positions = torch.tensor([0, 1, 2, 63, 255, 256, 1000, 2047])
    q, k = torch.randn(8, 4, 64).to(dtype), torch.randn(8, 2, 64).to(dtype)
    oracle = LlamaRotaryEmbedding(config)
    cos, sin = oracle(q, positions[None])
    want = apply_rotary_pos_emb(q, k, cos[0], sin[0])
    assert torch.equal(inverse_frequencies(spec)[0], oracle.inv_freq)
    rotary = Rotary(spec)
    tables = rotary.tables(positions, dtype)
    assert torch.equal(rotary.rotate(q, tables), want[0])
    assert torch.equal(rotary.rotate(k, tables), want[1])


def test_a_partial_rotation_leaves_the_rest_of_the_head() -> None:
    spec = rope_spec({"max_position_embeddings": 64, "partial_rotary_factor": 0.5}, 32)
    whole = rope_spec({"max_position_embeddings": 64}, 16)
    x, positions = torch.randn(5, 3, 32), torch.arange(5) + 3
    rotary = Rotary(spec)
    got = rotary.rotate(x, rotary.tables(positions, x.dtype))
    assert torch.equal(got[..., 16:], x[..., 16:])
    half = Rotary(whole)
    assert torch.equal(got[..., :16], half.rotate(x[..., :16], half.tables(positions, x.dtype)))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_the_gated_mlp_equals_transformers(act: str) -> None:
    torch.manual_seed(1)
    oracle = LlamaMLP(
        LlamaConfig(hidden_size=24, num_attention_heads=4, intermediate_size=56, hidden_act=act, mlp_bias=True)
    )
    gate_up = Linear(
        torch.cat((oracle.gate_proj.weight.data, oracle.up_proj.weight.data)),
        torch.cat((oracle.gate_proj.bias.data, oracle.up_proj.bias.data)),
    )
    mlp = GatedMlp(gate_up, Linear(oracle.down_proj.weight.data, oracle.down_proj.bias.data), activation(act))
    x = torch.randn(7, 24)
    assert (mlp(x) - oracle(x)).abs().max() < 1e-6


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'mish' is not supported.*silu"):
        activation("mish")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_linear_equals_a_plain_one(dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(2)
    weight, bias = torch.randn(70, 33).to(dtype), torch.randn(70).to(dtype) if with_bias else None
    plain, packed = Linear(weight, bias), Linear(weight.clone(), bias).pack()
    for num in (0, 1, 5, 64):
        x = torch.randn(num, 40).to(dtype)[:, 3:36]
        got, want = packed(x), plain(x)
        assert got.shape == want.shape
        assert got.dtype == dtype
        assert torch.allclose(got.float(), want.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert packed.pack() is packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norms_of_hybrids_are_centred_and_gated_as_transformers_has_them(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, gate, weight = torch.randn(5, 4, 16) * 3, torch.randn(5, 4, 16), torch.randn(16) / 4
    x, gate, weight = x.to(dtype), gate.to(dtype), weight.to(dtype)
    centred, gated = modeling.Qwen3_5RMSNorm(16, 1e-5).to(dtype), modeling.Qwen3_5RMSNormGated(16, 1e-5).to(dtype)
    with torch.no_grad():
        centred.weight.copy_(weight)
        gated.weight.copy_(weight)
        assert torch.equal(ZeroCentredRMSNorm(weight, 1e-5)(x), centred(x))
        assert torch.equal(GatedRMSNorm(weight, 1e-5).gated(x, gate), gated(x, gate))
    got = GatedRMSNorm(weight, 1e-5).gated(x.float(), gate)
    assert got.dtype == dtype
