"""A product and what follows it give what the separate calls give."""

import pytest
import torch

from memsvc.device.fp8 import Fp8Linear, QuantRows, quantise, quantise_weight
from memsvc.device.layers import Linear, RMSNorm, ZeroCentredRMSNorm

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels.mlp import gate_mul, silu_mul
from memsvc.device.kernels.norm import Parts, add_rms_norm, rms_norm
from memsvc.device.linear import (
    MOST_CUT_ROWS,
    AddNorm,
    Gated,
    gate_for,
    linear,
    linear_for,
    norm_for,
    pays,
    product,
    product_in_parts,
)


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
    layer, x = layer_of(40, 48, device), rows(5, 48, device)
    want = silu_mul(layer(x), "gelu")
    assert torch.equal(linear(x, layer, Gated(act="gelu")), want)


@pytest.mark.parametrize("kind", [RMSNorm, ZeroCentredRMSNorm])
def test_a_sum_and_its_norm_may_follow(device, kind):
    layer, x, residual = layer_of(24, 48, device), rows(5, 48, device), rows(5, 24, device)
    norm = kind(torch.randn(24).to(device, torch.bfloat16), 1e-6)
    want, summed = add_rms_norm(layer(x), residual.clone(), norm)
    got, kept = linear(x, layer, AddNorm(residual=residual.clone(), norm=norm))
    assert torch.equal(kept, summed)
    assert torch.equal(got, want)


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_parts_of_k_are_added_up_and_rounded_once(device, num_parts):
    x, residual = rows(5, 96, device), rows(5, 24, device)
    weight = layer_of(24, 96, device).weight
    norm = RMSNorm(torch.randn(24).to(device, torch.bfloat16), 1e-6)
    parts = product_in_parts(x, weight, num_parts)
    assert (parts.values.shape, parts.values.dtype) == ((num_parts, 5, 24), torch.float32)
    # In the kernel's order; the product itself against double precision.
    whole = sum(parts.values[1:], parts.values[0]).bfloat16()
    want = (x.double() @ weight.double().T).bfloat16()
    assert torch.allclose(whole, want, rtol=2**-7, atol=2**-9)
    assert torch.equal(rms_norm(parts, norm), rms_norm(whole, norm))
    got, kept = add_rms_norm(parts, residual.clone(), norm)
    wanted, summed = add_rms_norm(whole, residual.clone(), norm)
    assert torch.equal(kept, summed)
    assert torch.equal(got, wanted)


def test_parts_of_another_size_than_the_residual_are_refused_with_both(device):
    parts = product_in_parts(rows(5, 96, device), layer_of(24, 96, device).weight, 2)
    with pytest.raises(ValueError, match=r"x is \[5, 24\], the residual \[4, 24\]"):
        add_rms_norm(parts, rows(4, 24, device), RMSNorm(torch.ones(24, device=device), 1e-6))


@pytest.mark.parametrize(
    ("num_rows", "outputs", "k", "is_faster"),
    [
        (1, 4096, 4096, True),
        (MOST_CUT_ROWS, 4096, 12288, True),
        (MOST_CUT_ROWS + 1, 4096, 12288, False),
        (0, 4096, 12288, False),  # a chunk that ends no prompt
        (9, 6144, 4096, False),
        (9, 5120, 6144, False),
        (9, 5120, 17408, True),
        (MOST_CUT_ROWS // 2, 5120, 25600, True),
        (MOST_CUT_ROWS // 2 + 1, 5120, 25600, False),
        (9, 64, 192, False),
    ],
)
def test_parts_pay_where_measurement_says_so(num_rows, outputs, k, is_faster):
    assert pays(num_rows, outputs, k) == is_faster


@pytest.mark.parametrize(
    ("num_rows", "outputs", "k", "has_bias", "is_cut"),
    [
        (9, 256, 256, False, True),
        (MOST_CUT_ROWS, 128, 512, False, True),
        (MOST_CUT_ROWS + 1, 128, 512, False, False),
        (9, 512, 256, False, False),
        (9, 64, 192, False, False),
        (9, 256, 256, True, False),
    ],
)
def test_a_product_before_a_norm_is_cut_on_a_gpu_where_rows_are_few_and_k_is_long(
    device, num_rows, outputs, k, has_bias, is_cut
):
    layer, x = layer_of(outputs, k, device), rows(num_rows, k, device)
    if not has_bias:
        layer = Linear(layer.weight)
    got = product(x, layer)
    assert isinstance(got, Parts) == (is_cut and device == "cuda")
    whole = got.values.sum(0).bfloat16() if isinstance(got, Parts) else got
    assert torch.allclose(whole, layer(x), rtol=2**-7, atol=2**-7)


def fp8_layer(n, k, device):
    plain = layer_of(n, k, device)
    return Fp8Linear(quantise_weight(plain.weight, torch.bfloat16), plain.bias)


def assert_same(found, want):
    assert isinstance(found, QuantRows)
    assert torch.equal(found.values.float(), want.values.float())
    assert torch.equal(found.scales, want.scales)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_rows_come_in_8_bits_if_an_fp8_layer_follows(device, is_fp8):
    layer, x, residual = fp8_layer(32, 48, device), rows(5, 48, device), rows(5, 32, device)
    following = (fp8_layer if is_fp8 else layer_of)(16, 32, device)
    epilogue = AddNorm(residual=residual.clone(), norm=RMSNorm(torch.randn(32).to(device, torch.bfloat16), 1e-6))
    want, summed = linear(x, layer, AddNorm(residual=residual.clone(), norm=epilogue.norm))
    got, kept = linear_for(following, x, layer, epilogue)
    gated = linear_for(following, x, layer, Gated(act="gelu"))
    normed, gate = norm_for(following, residual, epilogue.norm), gate_for(following, residual, want, "sigmoid")
    wanted = [want, linear(x, layer, Gated(act="gelu")), rms_norm(residual, epilogue.norm)]
    wanted.append(gate_mul(residual, want, "sigmoid"))
    assert torch.equal(kept, summed)
    for found, plain in zip((got, gated, normed, gate), wanted, strict=True):
        if is_fp8:
            assert_same(found, quantise(plain))
        else:
            assert torch.equal(found, plain)


def test_an_fp8_layer_takes_rows_in_either_form(device):
    layer, x = fp8_layer(32, 48, device), rows(5, 48, device)
    want = layer(quantise(x))
    assert torch.equal(linear(x, layer), want)
    assert torch.equal(linear(quantise(x), layer), want)
    assert torch.equal(product(x, layer), want)
    assert want.dtype == torch.bfloat16
    with pytest.raises(AssertionError, match="for a layer that is not"):
        linear(quantise(x), layer_of(32, 48, device))
