"""Products of few rows against float64: within one rounding of a float32 sum. Sizes are odd on purpose."""

from dataclasses import replace

import pytest
import torch

from memsvc.device.layers import RMSNorm
from tests.support.rounding import rounds_alike, ulps_apart

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels.mlp import silu_mul
from memsvc.device.kernels.norm import Tap, add_rms_norm
from memsvc.device.kernels.skinny_gemm import counters, skinny_gated, skinny_linear, skinny_parts
from memsvc.device.kernels.skinny_norm import sum_add_rms_norm
from memsvc.device.kernels.skinny_tiles import SkinnyPlan

BF16 = torch.bfloat16
DIRECT = SkinnyPlan(16, 32)
SPLIT = SkinnyPlan(16, 16, splits=3)
STREAMED = SkinnyPlan(16, 16, streams=1)
PLANS = {"direct": DIRECT, "split": SPLIT, "streamed": STREAMED}
SHAPES = [(1, 16, 16), (3, 37, 61), (9, 50, 144), (130, 20, 35)]


@pytest.fixture(params=PLANS.values(), ids=PLANS)
def plan(request):
    return request.param


def operands(m, n, k, device, dtype=BF16):
    torch.manual_seed(m * 1000 + n)
    x, weight, bias = torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(n)
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


def exact(x, weight, bias=None):
    """float64, and the size of what is added up: a float32 sum is that exact."""
    y, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    return (y, size) if bias is None else (y + bias.double(), size + bias.double().abs())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_the_exact_one_but_for_one_rounding(device, plan, shape):
    x, weight, bias = operands(*shape, device)
    wide = skinny_linear(x, weight, bias, plan, torch.float32)
    y, size = exact(x, weight, bias)
    # The matrix units cut float32 off where numpy rounds it.
    assert ulps_apart(wide, y.float(), scale=size) <= (4 if device == "cpu" else 16)
    assert torch.equal(skinny_linear(x, weight, bias, plan), wide.to(BF16))
    y, size = exact(x, weight)
    # Half a unit, and where the exact value stands near the middle between two, what float32 lost.
    assert ulps_apart(skinny_linear(x, weight, None, plan), y.to(BF16), scale=size / 2**9) <= 1


def test_rows_may_be_those_of_a_view_and_values_float16(device, plan):
    x, weight, _ = operands(5, 24, 80, device, torch.float16)
    wide = torch.full((5, 200), torch.nan, dtype=torch.float16, device=device)
    wide[:, 16:96] = x
    got = skinny_linear(wide[:, 16:96], weight, None, plan)
    assert torch.equal(got, skinny_linear(x, weight, None, plan))
    assert ulps_apart(got, exact(x, weight)[0].half(), scale=1.0) <= 1


@pytest.mark.parametrize(
    "plan", [SkinnyPlan(16, 32, tma=True), SkinnyPlan(16, 16, streams=1, tma=True)], ids=["tiled", "streamed"]
)
@pytest.mark.parametrize("shape", [(3, 37, 64), (19, 24, 56)])
def test_tensor_maps_give_the_same_bits(device, plan, shape):
    x, weight, bias = operands(*shape, device)
    assert torch.equal(skinny_linear(x, weight, bias, plan), skinny_linear(x, weight, bias, replace(plan, tma=False)))
    with pytest.raises(ValueError, match="16 bytes"):
        skinny_linear(x[:, :-1], weight[:, :-1], bias, plan)


@pytest.mark.parametrize(("act", "shape"), [("silu", (3, 2 * 19, 61)), ("gelu_pytorch_tanh", (21, 2 * 24, 50))])
def test_a_gated_product_is_rounded_as_the_separate_kernels_round_it(device, plan, act, shape):
    x, weight, bias = operands(*shape, device)
    for b in (None, bias):
        apart = silu_mul(skinny_linear(x, weight, b, plan), act)
        assert rounds_alike(skinny_gated(x, weight, b, act, plan), apart, ulps=1)


@pytest.mark.parametrize("shape", [(3, 37, 61), (9, 40, 144)])
def test_the_norm_adds_up_what_the_product_left(device, plan, shape):
    m, n, _ = shape
    x, weight, bias = operands(*shape, device)
    norm = RMSNorm(torch.randn(n).to(device, BF16), 1e-6)
    residual = torch.randn(m, n).to(device, BF16)
    for b in (None, bias):
        kept, features = residual.clone(), torch.full((m + 4, 2 * n), torch.nan, dtype=BF16, device=device)
        tap = Tap(features=features[:, n:], first_row=torch.tensor([3], dtype=torch.int32, device=device))
        want, summed = add_rms_norm(skinny_linear(x, weight, b, plan), residual.clone(), norm.weight, norm.eps)
        got, same = sum_add_rms_norm(skinny_parts(x, weight, plan), b, kept, (norm.weight, norm.eps, False), tap)
        assert same is kept
        assert torch.equal(kept, summed)
        assert rounds_alike(got, want, ulps=2)
        assert torch.equal(features[3 : m + 3, n:], summed)
        assert int(features.isnan().sum()) == features.numel() - m * n


def test_a_rows_bits_depend_on_no_other_row_of_the_tile(device, plan):
    x, weight, _ = operands(16, 20, 64, device)
    whole = skinny_linear(x, weight, None, plan)
    for m in (1, 15):
        assert torch.equal(skinny_linear(x[:m], weight, None, plan), whole[:m])
    x[1:] = torch.nan
    assert torch.equal(skinny_linear(x, weight, None, plan)[:1], whole[:1])


def test_counters_are_zero_again_and_results_repeat(device):
    x, weight, _ = operands(9, 50, 144, device)
    for plan in (SPLIT, STREAMED):
        first = skinny_linear(x, weight, None, plan)
        assert torch.equal(first, skinny_linear(x, weight, None, plan))
        assert not counters(x.device, 1).any()


def test_no_rows_are_no_launch(device, plan):
    x, weight, _ = operands(2, 20, 32, device)
    assert skinny_linear(x[:0], weight, None, plan).shape == (0, 20)
    assert skinny_gated(x[:0], weight, None, "silu", plan).shape == (0, 10)
