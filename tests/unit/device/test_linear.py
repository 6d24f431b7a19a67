"""A product and what follows it give what the separate calls give, and the weight that comes next changes no value."""

import pytest
import torch

from memsvc.device.layers import Linear, RMSNorm, ZeroCentredRMSNorm

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels.mlp import silu_mul
from memsvc.device.kernels.norm import add_rms_norm
from memsvc.device.linear import AddNorm, Gated, linear


def layer_of(n, k, device):
    torch.manual_seed(n)
    weight = (torch.randn(n, k) / k**0.5).to(device, torch.bfloat16)
    return Linear(weight, torch.randn(n).to(device, torch.bfloat16))


def rows(m, k, device):
    return torch.randn(m, k).to(device, torch.bfloat16)


def test_nothing_may_follow(device):
    layer, x = layer_of(24, 48, device), rows(5, 48, device)
    assert torch.equal(linear(x, layer), layer(x))


def test_gates_may_follow(device):
    layer, x, ahead = layer_of(40, 48, device), rows(5, 48, device), rows(512, 1024, device)
    want = silu_mul(layer(x), "gelu")
    assert torch.equal(linear(x, layer, Gated(act="gelu")), want)
    assert torch.equal(linear(x, layer, Gated(act="gelu", ahead=ahead)), want)


@pytest.mark.parametrize("kind", [RMSNorm, ZeroCentredRMSNorm])
def test_a_sum_and_its_norm_may_follow(device, kind):
    layer, x, residual = layer_of(24, 48, device), rows(5, 48, device), rows(5, 24, device)
    norm = kind(torch.randn(24).to(device, torch.bfloat16), 1e-6)
    want, summed = add_rms_norm(layer(x), residual.clone(), norm)
    for ahead in (None, rows(512, 1024, device)):
        got, kept = linear(x, layer, AddNorm(residual=residual.clone(), norm=norm, ahead=ahead))
        assert torch.equal(kept, summed)
        assert torch.equal(got, want)
