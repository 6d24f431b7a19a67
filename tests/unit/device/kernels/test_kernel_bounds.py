"""An interpreted kernel that touches what it was not given fails, and says so."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _shift(x, out, num, by, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(out + at, tl.load(x + at + by, mask=at + by < num, other=0.0), mask=at < num)


@triton.jit
def _count(counters, at):
    tl.atomic_add(counters + at, 1)


@pytest.fixture
def interpreted(device):
    if device != "cpu":
        pytest.skip("a GPU notices only what lies far off")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("num", "by", "out_len"), [(8, -1, 8), (9, 1, 8), (8, 0, 6)], ids=["before", "past", "store"])
def test_an_element_outside_of_every_operand_is_an_error(num, by, out_len):
    with pytest.raises(InterpreterError, match="operands lie at"):
        _shift[(1,)](torch.arange(8.0), torch.zeros(out_len), num, by, WIDTH=16)


@pytest.mark.usefixtures("interpreted")
def test_masked_places_may_be_anywhere_and_views_reach_all_of_their_storage():
    x, out = torch.arange(8.0), torch.zeros(8)
    _shift[(1,)](x, out, 8, 3, WIDTH=16)
    assert out.tolist() == [3.0, 4.0, 5.0, 6.0, 7.0, 0.0, 0.0, 0.0]
    _shift[(1,)](x[4:], out[:2], 2, -1, WIDTH=16)
    assert out[:2].tolist() == [3.0, 4.0]


@pytest.mark.usefixtures("interpreted")
def test_atomics_are_checked_too():
    counters = torch.zeros(4, dtype=torch.int32)
    _count[(1,)](counters, 3)
    assert counters.tolist() == [0, 0, 0, 1]
    with pytest.raises(InterpreterError, match="create_atomic_rmw of 4 bytes"):
        _count[(1,)](counters, 4)
