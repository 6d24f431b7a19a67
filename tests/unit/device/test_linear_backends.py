"""The table decides who multiplies, and both give what the separate calls give."""

import pytest
import torch

from memsvc.device.layers import Linear, RMSNorm, ZeroCentredRMSNorm
from tests.support.rounding import rounds_alike, ulps_apart

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device import linear_backends, linear_table
from memsvc.device.kernels.mlp import silu_mul
from memsvc.device.kernels.norm import add_rms_norm
from memsvc.device.kernels.skinny_tiles import SkinnyPlan
from memsvc.device.linear_backends import AddNorm, Gated, linear, plan_for

PLAN, OTHER = SkinnyPlan(16, 16, splits=2), SkinnyPlan(16, 32)


@pytest.fixture
def table(monkeypatch):
    def use(choices):
        monkeypatch.setattr(linear_backends, "choices", choices)

    return use


def layer_of(n, k, device="cpu", bias=True, dtype=torch.bfloat16):
    torch.manual_seed(n)
    weight = (torch.randn(n, k) / k**0.5).to(device, dtype)
    return Linear(weight, torch.randn(n).to(device, dtype) if bias else None)


def rows(m, k, device="cpu", dtype=torch.bfloat16):
    return torch.randn(m, k).to(device, dtype)


def test_the_smallest_entry_that_holds_the_rows_counts_and_cublas_takes_the_rest(table):
    layer = layer_of(20, 32)
    table({("plain", 20, 32): ((4, PLAN), (8, None), (16, OTHER))})
    found = [plan_for(rows(m, 32), layer, None) for m in (1, 4, 5, 8, 9, 16, 17)]
    assert found == [PLAN, PLAN, None, None, OTHER, OTHER, None]
    assert plan_for(rows(4, 32), layer, Gated()) is None
    assert plan_for(rows(4, 40), layer_of(20, 40), None) is None


def test_what_the_kernels_cannot_multiply_goes_the_other_way(table):
    table({("plain", 20, 32): ((16, PLAN),)})
    assert plan_for(rows(2, 32, dtype=torch.float32), layer_of(20, 32, dtype=torch.float32), None) is None
    packed = layer_of(20, 32)
    packed.is_packed = True
    assert plan_for(rows(2, 32), packed, None) is None


@pytest.mark.parametrize("bias", [False, True])
def test_a_plain_product_is_the_layers(device, table, bias):
    layer, x = layer_of(24, 48, device, bias), rows(5, 48, device)
    for choices in ({}, {("plain", 24, 48): ((8, PLAN),)}):
        table(choices)
        assert ulps_apart(linear(x, layer), layer(x), scale=1.0) <= 1


@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_product_is_the_layers_and_the_gates(device, table, bias):
    layer, x = layer_of(40, 48, device, bias), rows(5, 48, device)
    want = silu_mul(layer(x), "silu")
    for choices in ({}, {("gated", 40, 48): ((8, PLAN),)}):
        table(choices)
        got = linear(x, layer, Gated())
        assert got.shape == want.shape
        assert ulps_apart(got, want, scale=1.0) <= 2


@pytest.mark.parametrize("kind", [RMSNorm, ZeroCentredRMSNorm])
def test_a_product_before_a_norm_is_the_layers_and_the_norms(device, table, kind):
    layer, x, residual = layer_of(24, 48, device), rows(5, 48, device), rows(5, 24, device)
    norm = kind(torch.randn(24).to(device, torch.bfloat16), 1e-6)
    want, summed = add_rms_norm(layer(x), residual.clone(), norm.weight, 1e-6, kind is ZeroCentredRMSNorm)
    for choices in ({}, {("norm", 24, 48): ((8, PLAN),)}):
        table(choices)
        got, kept = linear(x, layer, AddNorm(residual=residual.clone(), norm=norm))
        assert ulps_apart(kept, summed, scale=1.0) <= 1
        assert rounds_alike(got, want, ulps=4, scale=1.0)


def test_the_table_is_ascending_and_says_where_it_is_from():
    assert linear_table.SOURCE
    for (ending, _, _), entries in linear_table.CHOICES.items():
        assert ending in ("plain", "gated", "norm")
        assert [most for most, _ in entries] == sorted({most for most, _ in entries})
