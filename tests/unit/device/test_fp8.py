"""Rows and matrices in fp8: how they are rounded, and what their products are."""

import math

import pytest
import torch

from memsvc.device.fp8 import E4M3, LARGEST, Fp8Linear, QuantRows, arrange, made_linear, quantise, quantise_weight
from memsvc.device.layers import Linear

DTYPES = [torch.float32, torch.bfloat16]


def rows(n: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    made = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return (made * torch.logspace(-3, 3, n)[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_divided_by_its_peak_over_448_and_cast(dtype: torch.dtype) -> None:
    x = rows(9, 300, dtype)
    found = quantise(x)
    assert (found.values.dtype, found.scales.dtype, found.dtype) == (E4M3, torch.float32, dtype)
    assert found.scales.shape == (9, 1)
    peak = x.float().abs().amax(1, keepdim=True)
    assert torch.equal(found.scales, peak / 448)
    factor = (448 / peak.double()).float()
    assert torch.equal(found.values.float(), (x.float() * factor).to(E4M3).float())
    assert (found.values.float().abs().amax(1) == LARGEST).all()


def test_values_are_the_nearest_and_ties_go_to_even() -> None:
    levels = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    halves = (levels[1:] + levels[:-1]) / 2
    x = torch.cat((halves, -halves, torch.tensor([LARGEST])))[None]
    codes = quantise(x).values[0].view(torch.uint8)[:-1]
    assert (codes % 2 == 0).all()
    assert torch.equal(codes[:126] + 128, codes[126:])
    # Every level is its own.
    assert torch.equal(quantise(levels[None]).values[0].float(), levels)


def test_an_error_is_at_most_half_a_step() -> None:
    x = rows(20, 400)
    found = quantise(x)
    steps = torch.exp2(torch.frexp(found.values.float().abs().clamp_min(2.0**-6))[1] - 4.0) * found.scales
    assert ((found.floats() - x).abs() <= 0.5001 * steps).all()


def test_what_leaves_the_range_by_rounding_is_cut_off() -> None:
    # One in a hundred of such peaks times 448 over itself is above 448.
    peaks = torch.rand(5000, 1, generator=torch.Generator().manual_seed(3)) * 1e3 + 1e-3
    assert (quantise(peaks).values.float() == LARGEST).all()
    assert (quantise(-peaks).values.float() == -LARGEST).all()


def test_zeros_stay_zeros_and_tiny_rows_keep_a_normal_scale() -> None:
    x = torch.zeros(3, 16)
    x[1, 3], x[2, 5] = 1e-44, 1e-20
    found = quantise(x)
    assert (found.scales >= torch.finfo(torch.float32).tiny).all()
    assert found.scales.isfinite().all()
    assert not found.values[:2].float().any()
    assert found.floats()[2, 5] == pytest.approx(1e-20)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_becomes_nan_and_the_others_are_not_touched(odd: float) -> None:
    x = rows(3, 32)
    clean = quantise(x)
    x[1, 7] = odd
    found = quantise(x)
    layer = Fp8Linear(quantise_weight(rows(8, 32, seed=2), torch.float32))
    assert layer(found)[1].isnan().all()
    for i in (0, 2):
        assert torch.equal(found.values[i].float(), clean.values[i].float())
    assert torch.equal(layer(found)[::2], layer(clean)[::2])


def test_a_matrix_is_rounded_row_by_row_in_parts_and_must_be_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = rows(50, 64)
    whole = quantise(weight)
    monkeypatch.setattr("memsvc.device.fp8._CHUNK_ROWS", 7)
    parts = quantise_weight(weight, torch.bfloat16)
    assert torch.equal(parts.values.float(), whole.values.float())
    assert torch.equal(parts.scales, whole.scales)
    assert parts.dtype == torch.bfloat16
    weight[8, 1], weight[30, 2] = math.nan, math.inf
    with pytest.raises(ValueError, match="2 rows hold weights that are not finite"):
        quantise_weight(weight, torch.bfloat16)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_of_what_the_codes_stand_for(dtype: torch.dtype, has_bias: bool) -> None:
    weight = quantise_weight(rows(40, 512, seed=2), dtype)
    bias = rows(1, 40, dtype, seed=3)[0] if has_bias else None
    x = rows(6, 512, dtype)
    found = Fp8Linear(weight, bias)(x)
    codes = quantise(x)
    exact = codes.values.double() @ weight.values.double().t() * codes.scales.double() * weight.scales.double().t()
    exact = exact if bias is None else exact + bias.double()
    size = codes.floats().abs() @ weight.floats().abs().t()
    assert found.dtype == dtype
    bound = size * 2.0**-20 + exact.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-22)
    assert ((found.double() - exact).abs() <= bound).all()
    assert torch.equal(Fp8Linear(weight, bias)(codes), found)


def test_no_rows_have_no_product() -> None:
    layer = Fp8Linear(quantise_weight(rows(8, 16), torch.bfloat16))
    assert layer(torch.empty(0, 16, dtype=torch.bfloat16)).shape == (0, 8)
    assert layer.pack() is layer


def test_the_error_of_a_product_is_a_few_percent() -> None:
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(64, 2048, generator=generator), torch.randn(32, 2048, generator=generator)
    want = x @ weight.t()
    found = Fp8Linear(quantise_weight(weight, torch.float32))(x)
    assert 0.01 < float((found - want).norm() / want.norm()) < 0.05


def test_rows_are_chosen_and_put_in_order_with_their_scales() -> None:
    x = rows(6, 32)
    found = quantise(x)
    order = torch.tensor([4, 0])
    assert torch.equal(found.index_select(0, order).floats(), found.floats()[order])
    both = arrange(lambda a, b: torch.cat((b, a[2:])), found, quantise(x[:3]))
    assert isinstance(both, QuantRows)
    assert torch.equal(both.floats(), torch.cat((found.floats()[:3], found.floats()[2:])))
    plain = arrange(lambda a: a[1:], x)
    assert isinstance(plain, torch.Tensor)
    assert torch.equal(plain, x[1:])


def test_a_layer_is_of_what_its_weight_is() -> None:
    assert type(made_linear(rows(4, 16), None)) is Linear
    assert type(made_linear(quantise(rows(4, 16)), None)) is Fp8Linear


SIZES = [(1, 16, 16), (9, 6144, 4096), (288, 4096, 12288), (2048, 256, 512)]
SUMMED = 32
"""Products of fp8 that Hopper's matrix units add to a sum at once."""
LOST = 2.0**-13
"""Of the largest number that they add up: what is below it in the others is cut off, and no more of the sum is kept."""


def largest_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n, out]: the largest magnitude of a sum of a b^T on its way, SUMMED products further at each step."""
    total = torch.zeros(len(a), len(b), device=a.device)
    most = total.clone()
    for start in range(0, a.shape[1], SUMMED):
        total += a[:, start : start + SUMMED] @ b[:, start : start + SUMMED].t()
        most = torch.maximum(most, total.abs())
    return most


def small_numbers(n: int, k: int, peak_at: int, device: str) -> torch.Tensor:
    """bfloat16 [n, k]: -1, 0 and 1 times a power of two a row, and in one column 448 times that, so all have codes."""
    generator = torch.Generator(device).manual_seed(n)
    x = torch.randint(-1, 2, (n, k), generator=generator, device=device).float()
    x[:, :2] = 0.0
    x[:, peak_at] = LARGEST
    return (x * torch.exp2(torch.arange(n, device=device) % 7 - 3.0)[:, None]).bfloat16()


def exact_case(n: int, out: int, k: int, device: str) -> tuple[QuantRows, QuantRows]:
    """Rows and a weight. Peaks meet zeros, so every sum is a power of two times an integer of 13 bits at most."""
    weight = quantise_weight(small_numbers(out, k, 1, device), torch.bfloat16)
    return quantise(small_numbers(n, k, 0, device)), weight


@pytest.mark.parametrize(("n", "out", "k"), [(1, 16, 16), (9, 96, 4096), (20, 64, 12288)])
def test_small_numbers_are_their_codes_and_their_sums_fit_13_bits(n: int, out: int, k: int) -> None:
    codes, weight = exact_case(n, out, k, "cpu")
    assert torch.equal(codes.floats(), small_numbers(n, k, 0, "cpu").float())
    assert torch.equal(torch.frexp(codes.scales)[0], torch.full_like(codes.scales, 0.5))
    assert largest_sums(codes.values.float(), weight.values.float()).max() < 1 / LOST
    assert torch.equal(Fp8Linear(weight)(codes), (codes.floats() @ weight.floats().t()).bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnDevice:
    """The device's product against the reference in float32."""

    @pytest.mark.parametrize(("n", "out", "k"), SIZES)
    def test_a_product_whose_sums_fit_the_matrix_units_is_exact(self, n: int, out: int, k: int) -> None:
        codes, weight = exact_case(n, out, k, "cuda")
        want = codes.floats() @ weight.floats().t()
        assert torch.equal(Fp8Linear(weight)(codes), want.bfloat16())

    @pytest.mark.parametrize(("n", "out", "k"), SIZES)
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_a_product_is_the_references(self, n: int, out: int, k: int, has_bias: bool) -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        weight = torch.randn(out, k, generator=generator, device="cuda").bfloat16()
        x = torch.randn(n, k, generator=generator, device="cuda").bfloat16()
        bias = torch.randn(out, generator=generator, device="cuda").bfloat16() if has_bias else None
        rows_of_weight, codes = quantise_weight(weight, torch.bfloat16), quantise(x)
        found = Fp8Linear(rows_of_weight, bias)(codes)
        want = codes.floats() @ rows_of_weight.floats().t()
        added = torch.zeros(out, device="cuda") if bias is None else bias.float()
        want += added
        assert found.dtype == torch.bfloat16
        error = (found.float() - want).abs()
        # At each step the sum is cut off, always towards zero. Products are too, and half of them are negative.
        units = -(-k // SUMMED) + 3 * k**0.5
        lost = LOST * units * largest_sums(codes.floats(), rows_of_weight.floats())
        assert (error <= lost + want.abs() * 2.0**-7 + added.abs() * 2.0**-8).all()
        # All in all far less than the rounding to 8 bits has changed, 3.7 %.
        assert error.norm() <= 0.01 * want.norm()

    def test_sizes_that_the_device_cannot_multiply_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"it is \[40, 24\], fp8 on a CUDA device needs multiples of 16"):
            Fp8Linear(quantise(torch.randn(40, 24, device="cuda")))

    def test_a_captured_product_copies_and_rounds_no_weight(self) -> None:
        layer = Fp8Linear(quantise_weight(torch.randn(4096, 4096, device="cuda"), torch.bfloat16))
        codes = quantise(torch.randn(9, 4096, device="cuda").bfloat16())
        layer(codes)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(codes)
        assert torch.cuda.max_memory_allocated() - before < layer.weight.nbytes
