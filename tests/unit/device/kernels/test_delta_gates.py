"""Against what DeltaLayer.mix computes: gates as far as exp is exact on a GPU, norms as test_norm.py compares them."""

import pytest
import torch
import torch.nn.functional as F

from memsvc.device.layers import GatedRMSNorm
from tests.support.rounding import rounds_alike

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels.delta_gates import delta_gates, gated_norm

DTYPES = [torch.float32, torch.bfloat16]
FEW = {torch.float32: 5, torch.bfloat16: 2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "heads"), [(1, 1), (5, 4), (9, 48)])
def test_gates_are_those_of_the_layer(device, dtype, num_rows, heads):
    torch.manual_seed(heads)
    wide = (torch.randn(num_rows, 200) * 6).to(device, dtype)
    wide[0, 100] = 90.0
    wide[-1, 100] = -60.0
    b, a = wide[:, 3 : 3 + heads], wide[:, 100 : 100 + heads]
    rate, dt_bias = -torch.rand(64, device=device), torch.randn(64, device=device)
    got = delta_gates(b, a, rate, dt_bias)
    g = rate[:heads] * F.softplus(a.float() + dt_bias[:heads])
    want = torch.stack((g, b.float().sigmoid()), dim=1)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=2e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "heads", "width"), [(1, 1, 8), (3, 3, 10), (2, 4, 128), (3, 2, 300)])
def test_the_gated_norm_is_the_references(device, dtype, num_rows, heads, width):
    torch.manual_seed(width)
    norm = GatedRMSNorm(torch.randn(width).to(device, dtype), 1e-6)
    x = (torch.randn(num_rows, heads, width) * 3).to(device)
    wide = torch.randn(num_rows, heads * width + 33).to(device, dtype)
    gate = wide[:, 16 : 16 + heads * width].view(num_rows, heads, width)
    got = gated_norm(x, gate, norm)
    assert rounds_alike(got, norm.gated(x, gate).flatten(1), ulps=FEW[dtype])


def test_no_rows_are_no_launch(device):
    none = torch.zeros(0, 2, 8, device=device)
    assert gated_norm(none, none, GatedRMSNorm(torch.ones(8, device=device), 1e-6)).shape == (0, 16)
    assert delta_gates(none[:, 0], none[:, 1], torch.ones(8), torch.ones(8)).shape == (0, 2, 8)
