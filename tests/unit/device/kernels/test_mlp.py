"""Against layers.GatedMlp's product: bfloat16 equal but for one value in fifty, which is within one unit in the
last place; float32 within a few units."""

import pytest
import torch

from memsvc.device.layers import ACTIVATIONS, activation
from tests.support.rounding import rounds_alike, ulps_apart

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels import mlp

DTYPES = [torch.float32, torch.bfloat16]
LEAST = 1e-3
"""Below it the reference's own gelus are the coarser ones: their erf and tanh cancel against 1."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_the_references(device, dtype, name):
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 2 * 1100) * 4).to(device, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    got, want = mlp.silu_mul(gate_up, name), activation(name)(gate).mul_(up)
    if dtype == torch.bfloat16:
        assert ulps_apart(got, want, scale=LEAST) <= 1
        seen = want.abs() >= LEAST
        assert rounds_alike(got[seen], want[seen], ulps=1)
    else:
        assert ulps_apart(got, want, scale=(gate * up).abs().clamp_min(LEAST)) <= 4


@pytest.mark.parametrize("width", [1, 17, 64])
def test_odd_widths_are_masked(device, width):
    torch.manual_seed(width)
    gate_up = torch.randn(5, 2 * width).to(device, torch.bfloat16)
    gate, up = gate_up.chunk(2, dim=-1)
    assert ulps_apart(mlp.silu_mul(gate_up), activation("silu")(gate).mul_(up)) <= 1


def test_the_gate_of_attention_may_lie_in_wider_rows(device):
    torch.manual_seed(1)
    qkv = torch.randn(4, 96).to(device, torch.bfloat16)
    out = torch.randn(4, 32).to(device, torch.bfloat16)
    want = out * torch.sigmoid(qkv[:, 64:])
    assert ulps_apart(mlp.gate_mul(qkv[:, 64:], out, "sigmoid"), want) <= 1


def test_large_values_neither_overflow_nor_vanish(device):
    gate = torch.tensor([[-1e4, -100.0, -90.0, 0.0, 90.0, 1e4]], device=device)
    for name in ACTIVATIONS:
        got = mlp.gate_mul(gate, torch.ones_like(gate), name)
        assert torch.allclose(got, activation(name)(gate), atol=1e-30), name


def test_an_unknown_activation_is_refused_with_the_known_ones(device):
    with pytest.raises(ValueError, match="supported are silu"):
        mlp.silu_mul(torch.zeros(1, 2, device=device), "mish")
