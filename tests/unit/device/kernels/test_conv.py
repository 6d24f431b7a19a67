"""Against draft_worker.conv: bfloat16 equal but for one value in fifty, which is within one unit in the last place (two
after the norm); float32 within a few units of what was added up."""

import pytest
import torch

from draft_worker.conv import LocalConv, finish
from memsvc.device.layers import Linear, RMSNorm
from tests.support.rounding import rounds_alike

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels import conv

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6


class Case:
    """Blocks of random rows, with the reference's convolution and the kernels' taps."""

    def __init__(self, device, dtype, *, num_taps=2, num_groups=3, group=16, num_rows=4):
        torch.manual_seed(num_taps * 100 + group)
        width, self.num_rows = num_groups * group, num_rows
        self.u, self.y, self.x = (torch.randn(3, num_rows, width).to(device, dtype) for _ in range(3))
        base = torch.randn(2, num_taps, width).to(device, dtype)
        projection = Linear((torch.randn(2 * num_taps * num_groups, width) * 0.2).to(device, dtype))
        self.reference = LocalConv(base, projection)
        dynamic = projection(self.u.flatten(0, 1))
        self.taps = conv.ConvTaps(base=base, dynamic=dynamic, block_size=num_rows)
        self.few = 1 if dtype == torch.bfloat16 else 4


SHAPES = [
    {},
    {"num_taps": 1},
    {"num_taps": 3, "num_groups": 5, "group": 12},
    {"num_taps": 4, "num_rows": 2},
    {"num_groups": 1, "group": 70, "num_rows": 1},
    {"num_groups": 80, "group": 16, "num_rows": 2},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_sides_are_the_references(device, dtype, shape):
    case = Case(device, dtype, **shape)
    want, taps = case.reference.prepare(case.u)
    got = conv.conv_prepare(case.u.flatten(0, 1), case.taps).view_as(want)
    assert rounds_alike(got, want, ulps=case.few, scale=4.0)
    got = conv.conv_finish(case.y.flatten(0, 1), case.taps).view_as(want)
    assert rounds_alike(got, finish(case.y, taps), ulps=case.few, scale=4.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skip", [0, 1])
def test_the_fused_kernel_is_finish_then_sum_then_norm(device, dtype, skip):
    case = Case(device, dtype, num_taps=2, num_groups=5, group=12)
    _, taps = case.reference.prepare(case.u)
    norm = RMSNorm(torch.randn(60).to(device, dtype), EPS)
    want = case.x + finish(case.y, taps)
    residual = case.x.clone()
    got, kept = conv.conv_finish_add_rms_norm(case.y.flatten(0, 1), case.taps, residual.flatten(0, 1), norm, skip)
    assert kept.data_ptr() == residual.data_ptr()
    assert torch.equal(residual[:, :skip], case.x[:, :skip])
    assert rounds_alike(residual[:, skip:], want[:, skip:], ulps=case.few, scale=4.0)
    normed = norm(residual[:, skip:])
    assert rounds_alike(got.view_as(normed), normed, ulps=4 if dtype == torch.float32 else 2)


def test_no_block_sees_the_one_before_it(device):
    case = Case(device, torch.float32)
    first = conv.conv_prepare(case.u.flatten(0, 1), case.taps).view_as(case.u)
    case.u[1] = torch.nan
    again = conv.conv_prepare(case.u.flatten(0, 1), case.taps).view_as(case.u)
    assert torch.equal(again[0], first[0])
    assert torch.equal(again[2], first[2])
