"""Against layers.RMSNorm. bfloat16: equal but for one value in fifty, which is within one unit in the last place of
the normed value (the weight can carry it into two), sums equal; float32: within a few units, as the sum of squares
is added up in another order."""

import pytest
import torch

from memsvc.device.layers import RMSNorm, ZeroCentredRMSNorm
from tests.support.rounding import rounds_alike

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels.norm import MAX_WIDTH, Tap, add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16]
FEW = {torch.float32: 4, torch.bfloat16: 2}
EPS = 1e-6


def norm_of(kind, width, device, dtype):
    weight = torch.randn(width).to(device, dtype)
    return RMSNorm(weight, EPS) if kind == "plain" else ZeroCentredRMSNorm(weight, EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "zero-centred"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (9, 100), (3, 576), (2, 5120), (1, MAX_WIDTH)])
def test_a_norm_is_the_references(device, dtype, kind, num_rows, width):
    torch.manual_seed(width)
    norm = norm_of(kind, width, device, dtype)
    x = (torch.randn(num_rows, width) * 3).to(device, dtype)
    got = rms_norm(x, norm)
    assert rounds_alike(got, norm(x), ulps=FEW[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "zero-centred"])
def test_the_norm_is_of_the_rounded_sum_and_the_residual_becomes_the_sum(device, dtype, kind):
    torch.manual_seed(1)
    norm = norm_of(kind, 200, device, dtype)
    x, residual = (torch.randn(7, 200).to(device, dtype) for _ in range(2))
    want = residual + x
    got, kept = add_rms_norm(x, residual, norm)
    assert kept.data_ptr() == residual.data_ptr()
    assert torch.equal(residual, want)
    assert rounds_alike(got, norm(want), ulps=FEW[dtype])


def test_only_the_rows_of_a_view_are_normed_and_summed(device):
    torch.manual_seed(2)
    norm = norm_of("plain", 48, device, torch.bfloat16)
    x, residual = (torch.randn(3, 4, 48).to(device, torch.bfloat16) for _ in range(2))
    before, want = residual.clone(), residual + x
    got, _ = add_rms_norm(x[:, 1:], residual[:, 1:], norm)
    assert got.is_contiguous()
    assert rounds_alike(got, norm(want[:, 1:]), ulps=2)
    assert torch.equal(residual[:, 1:], want[:, 1:])
    assert torch.equal(residual[:, 0], before[:, 0])


def test_a_tap_copies_the_sum_to_the_rows_named_on_the_device(device):
    torch.manual_seed(3)
    norm = norm_of("plain", 40, device, torch.bfloat16)
    x, residual = (torch.randn(5, 40).to(device, torch.bfloat16) for _ in range(2))
    features = torch.full((12, 3 * 40), torch.nan, dtype=torch.bfloat16, device=device)
    want = residual + x
    tap = Tap(features=features[:, 40:80], first_row=torch.tensor([6], dtype=torch.int32, device=device))
    add_rms_norm(x, residual, norm, tap)
    assert torch.equal(features[6:11, 40:80], want)
    features[6:11, 40:80] = torch.nan
    assert features.isnan().all()


def test_rows_that_are_too_wide_are_refused_with_their_width(device):
    x = torch.zeros(1, MAX_WIDTH + 1, device=device)
    with pytest.raises(ValueError, match="16385"):
        rms_norm(x, RMSNorm(x[0], EPS))


def test_no_rows_are_no_launch(device):
    x = torch.zeros(0, 32, device=device)
    assert rms_norm(x, RMSNorm(torch.ones(32, device=device), EPS)).shape == (0, 32)
