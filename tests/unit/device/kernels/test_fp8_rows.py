"""Rows rounded to fp8 by kernels are, bit for bit, what fp8.quantise makes of them, or of what the plain kernel gives.

A norm alone may have another root than the plain kernel's, since squares are added up in the order that a compiled
kernel's layout has them: it is a few last bits away, and all that follows from it has to be exact.
"""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from memsvc.device.fp8 import QuantRows, quantise
from memsvc.device.layers import RMSNorm, ZeroCentredRMSNorm

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels.fp8_rows import MAX_WIDTH, quantise_rows
from memsvc.device.kernels.mlp import gate_mul, gate_mul_fp8, silu_mul, silu_mul_fp8
from memsvc.device.kernels.norm import Parts, Tap, add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8

DTYPES = [torch.float32, torch.bfloat16]
ULPS = 8
"""By which a root may be off: sums of squares, and two of the device's own square root."""


def rows(n, k, device, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed + k)
    return (torch.randn(n, k) * torch.logspace(-2, 2, n)[:, None]).to(device, dtype)


def assert_same(found: QuantRows, want: QuantRows) -> None:
    assert found.dtype == want.dtype
    assert torch.equal(found.scales.nan_to_num(-1.0), want.scales.nan_to_num(-1.0))
    # -1 is no code's value where NaN has been.
    assert torch.equal(found.values.float().nan_to_num(-1e9), want.values.float().nan_to_num(-1e9))


def is_same(found: QuantRows, want: QuantRows) -> torch.Tensor:
    """Of each row, whether its scale and all its codes are."""
    scales, codes = (
        (a.float().nan_to_num(-1e9) == b.float().nan_to_num(-1e9)).all(1)
        for a, b in ((found.scales, want.scales), (found.values, want.values))
    )
    return scales & codes


def assert_rounds_norm(found: QuantRows, x: torch.Tensor, norm: RMSNorm) -> None:
    """found is, row by row, quantise of norm(x) computed with one of the floats that are the root within ULPS."""
    assert found.dtype == x.dtype
    wide = x.float()
    root = (x.double().square().mean(1, keepdim=True) + norm.eps).rsqrt().float()
    seen = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for shift in range(-ULPS, ULPS + 1):
        value = wide * (root.view(torch.int32) + shift).view(torch.float32)
        if not isinstance(norm, ZeroCentredRMSNorm):
            value = value.to(x.dtype).float()
        seen |= is_same(found, quantise((value * norm.weight.float()).to(x.dtype)))
    assert seen.all(), seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (9, 100), (3, 576), (2, 5120), (1, MAX_WIDTH), (0, 64)])
def test_rows_are_rounded_as_the_reference_rounds_them(device, dtype, n, k):
    x = rows(n, k, device, dtype)
    assert_same(quantise_rows(x), quantise(x))


def test_only_the_columns_of_a_view_are_read(device):
    x = rows(5, 96, device)
    assert_same(quantise_rows(x[:, 16:64]), quantise(x[:, 16:64]))


def test_zeros_ties_and_rows_that_are_not_finite_are_the_references(device):
    x = torch.zeros(7, 256, device=device)
    levels = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x[1, :126], x[1, 200] = ((levels[1:] + levels[:-1]) / 2).to(device), 448.0
    x[2], x[3, 4], x[4, 5], x[5, 6] = 1e-44, math.nan, math.inf, -math.inf
    x[6] = torch.logspace(-9, 3, 256)
    assert_same(quantise_rows(x), quantise(x))


def test_a_row_that_is_too_wide_is_refused_with_both_sizes(device):
    with pytest.raises(ValueError, match=f"rows of {MAX_WIDTH + 1} are wider than {MAX_WIDTH}"):
        quantise_rows(torch.zeros(1, MAX_WIDTH + 1, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [RMSNorm, ZeroCentredRMSNorm])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (9, 100), (3, 576), (2, 5120)])
def test_a_norm_in_fp8_is_the_plain_one_rounded(device, dtype, kind, n, k):
    norm, x = kind(torch.randn(k).to(device, dtype), 1e-6), rows(n, k, device, dtype)
    assert_rounds_norm(rms_norm_fp8(x, norm), x, norm)
    assert_rounds_norm(quantise(rms_norm(x, norm)), x, norm)
    residual = rows(n, k, device, dtype, seed=9)
    tapped = [torch.zeros(n + 2, k, dtype=dtype, device=device) for _ in range(2)]
    first = torch.tensor([2], device=device)
    want, summed = add_rms_norm(x, residual.clone(), norm, Tap(features=tapped[0], first_row=first))
    found, kept = add_rms_norm_fp8(x, residual.clone(), norm, Tap(features=tapped[1], first_row=first))
    assert torch.equal(kept, summed)
    assert_rounds_norm(found, summed, norm)
    assert_rounds_norm(quantise(want), summed, norm)
    assert torch.equal(*tapped)


def test_parts_are_added_up_rounded_normed_and_rounded_again(device):
    parts = Parts(torch.randn(2, 5, 64).to(device), torch.bfloat16)
    norm = RMSNorm(torch.randn(64).to(device, torch.bfloat16), 1e-6)
    summed = (parts.values[0] + parts.values[1]).bfloat16()
    assert_rounds_norm(rms_norm_fp8(parts, norm), summed, norm)
    assert_rounds_norm(quantise(rms_norm(parts, norm)), summed, norm)


def test_a_row_with_nan_is_nan_and_no_other(device):
    x = rows(4, 64, device)
    x[2, 3] = math.nan
    norm = RMSNorm(torch.ones(64, device=device, dtype=torch.bfloat16), 1e-6)
    found = rms_norm_fp8(x, norm)
    assert found.scales[:, 0].isnan().tolist() == [False, False, True, False]
    assert found.values[2].float().isnan().all()
    others = torch.tensor([0, 1, 3], device=device)
    assert_rounds_norm(found.index_select(0, others), x[others], norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
@pytest.mark.parametrize(("n", "k"), [(1, 48), (5, 200), (2, 3000)])
def test_gated_rows_in_fp8_are_the_plain_ones_rounded(device, dtype, act, n, k):
    x = rows(n, 2 * k, device, dtype)
    assert_same(silu_mul_fp8(x, act), quantise(silu_mul(x, act)))


def test_the_gate_of_attention_may_be_columns_of_a_wider_tensor(device):
    x, up = rows(5, 160, device), rows(5, 64, device, seed=3)
    assert_same(gate_mul_fp8(x[:, 96:], up, "sigmoid"), quantise(gate_mul(x[:, 96:], up, "sigmoid")))
    with pytest.raises(ValueError, match="'tanh' is not supported"):
        gate_mul_fp8(x[:, 96:], up, "tanh")


def test_without_a_gpu_they_compile_for_hopper_with_wide_accesses_and_no_spills(tmp_path):
    # A process of its own: in this one kernels may be interpreted.
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.compile_fp8"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=240)
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kernel["kernel"] for kernel in kernels] == ["_norm", "_gated_fp8", "_quantise"] * 2
    for kernel in kernels:
        assert kernel["spilled"] == 0, kernel
        assert min(kernel["read_bytes"], kernel["write_bytes"]) == 16, kernel
        assert kernel["is_cut_off"], kernel
