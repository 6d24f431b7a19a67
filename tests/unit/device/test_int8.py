"""Matrices in int8: how rows are rounded, how they are read back, and what is refused."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memsvc.device.checkpoint import SINGLE_FILE, CheckpointReader
from memsvc.device.int8 import dequantise_rows, quantise_rows

CODES = torch.tensor([[-128, 0, 127], [1, -2, 3]], dtype=torch.int8)
SCALE = torch.tensor([[0.5], [0.0625]])
PLAIN = [[-64.0, 0.0, 63.5], [0.0625, -0.125, 0.1875]]


def folder(path: Path, **changes: torch.Tensor | None) -> Path:
    """A checkpoint of one matrix; a key of changes is what is added to its name."""
    tensors = {"": CODES, "_scale": SCALE} | changes
    save_file({f"a.weight{key}": tensor for key, tensor in tensors.items() if tensor is not None}, path / SINGLE_FILE)
    return path


def test_a_stored_matrix_is_its_codes_times_the_scale_of_the_row(tmp_path: Path) -> None:
    with CheckpointReader(folder(tmp_path)) as reader:
        assert reader.get("a.weight", (2, 3), torch.float32).tolist() == PLAIN
        assert reader.get("a.weight", (2, 3), torch.bfloat16).dtype == torch.bfloat16
        assert reader.unused() == []


def test_the_product_is_made_in_float32_and_rounded_once() -> None:
    codes = torch.randint(-128, 128, (40, 33), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    scale = torch.rand(40, 1, generator=torch.Generator().manual_seed(2)) / 100
    found = dequantise_rows(codes, scale, torch.bfloat16)
    for i in range(40):
        for j in range(33):
            exact = codes[i, j].item() * scale[i, 0].item()  # a product of float32 is exact in Python's doubles
            assert found[i, j] == torch.tensor(exact, dtype=torch.float32).bfloat16(), (i, j)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_scale": None}, r"no tensor a\.weight_scale \(wanted \[2, 1\]\)"),
        ({"_scale": torch.ones(2)}, r"a\.weight_scale in .* is \[2\], the config asks for \[2, 1\]"),
        ({"_scale": torch.ones(1, 1)}, r"a\.weight_scale in .* is \[1, 1\]"),
        ({"_scale": torch.ones(2, 1, dtype=torch.int32)}, r"a\.weight_scale is torch\.int32"),
        ({"_scale": torch.tensor([[1.0], [math.nan]])}, r"a\.weight_scale: 1 of 2 scales"),
        ({"_scale": torch.tensor([[0.0], [-1.0]])}, r"a\.weight_scale: 2 of 2 scales"),
        ({"_zero_point": torch.zeros(2, 1, dtype=torch.int8)}, r"a\.weight_zero_point is there"),
        ({"": CODES.to(torch.uint8)}, r"a\.weight in .* is torch\.uint8"),
        ({"": CODES.float().to(torch.float8_e5m2)}, r"a\.weight in .* is torch\.float8_e5m2"),
    ],
)
def test_what_is_stored_otherwise_is_refused_by_name(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    with CheckpointReader(folder(tmp_path, **changes)) as reader, pytest.raises(ValueError, match=message):
        reader.get("a.weight", (2, 3), torch.float32)


def test_only_matrices_may_be_int8(tmp_path: Path) -> None:
    save_file({"norm.weight": CODES[0].clone(), "norm.weight_scale": torch.ones(3, 1)}, tmp_path / SINGLE_FILE)
    with CheckpointReader(tmp_path) as reader, pytest.raises(ValueError, match=r"norm\.weight .* only matrices"):
        reader.get("norm.weight", (3,), torch.float32)


def test_scales_without_a_matrix_in_int8_are_left_over(tmp_path: Path) -> None:
    with CheckpointReader(folder(tmp_path, **{"": torch.ones(2, 3)})) as reader:
        reader.get("a.weight", (2, 3), torch.float32)
        assert reader.unused() == ["a.weight_scale"]
        assert list(reader.stored()) == ["a.weight", "a.weight_scale"]


def test_what_belongs_to_a_matrix_in_int8_is_no_tensor_of_its_own(tmp_path: Path) -> None:
    changes = {"_zero_point": torch.zeros(2, 1, dtype=torch.int8), "_extra": torch.ones(2)}
    with CheckpointReader(folder(tmp_path, **changes)) as reader:
        assert reader.stored() == {"a.weight": (SINGLE_FILE, (2, 3)), "a.weight_extra": (SINGLE_FILE, (2,))}


def squared_error(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Of each row under that scale, in float64."""
    rows, scale = rows.double(), scale.double()
    return ((rows / scale).round().clamp(-128, 127) * scale - rows).square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_clip_of_least_squared_error(dtype: torch.dtype) -> None:
    rows = torch.randn(5000, 64, generator=torch.Generator().manual_seed(3))
    codes, scale = quantise_rows(rows, dtype)
    assert (codes.shape, codes.dtype, scale.shape, scale.dtype) == (rows.shape, torch.int8, (5000, 1), dtype)
    error = (codes.double() * scale.double() - rows.double()).square().sum(1)
    peak = rows.abs().amax(1, keepdim=True)
    tried = torch.stack([squared_error(rows, (peak * (1 - step / 400) / 127).to(dtype)) for step in range(24)])
    assert (error <= 1.0001 * tried.amin(0)).all()
    assert error.sum() < 0.95 * tried[0].sum()


def test_the_error_of_a_weight_is_at_most_half_a_step_or_what_was_cut_off() -> None:
    rows = torch.randn(300, 200, generator=torch.Generator().manual_seed(4))
    codes, scale = quantise_rows(rows, torch.float32)
    step = scale.expand_as(rows)
    error = (dequantise_rows(codes, scale, torch.float32) - rows).abs()
    bound = torch.maximum(0.5001 * step, rows.abs() - 127 * step)
    assert (error <= bound).all()


def test_an_outlier_is_cut_off_where_that_helps_the_others() -> None:
    row = torch.full((1, 40_000), 100.5 / 127)
    row[0, 0] = 1.0
    codes, scale = quantise_rows(row, torch.float32)
    assert scale.item() * 127 < 0.999
    found = dequantise_rows(codes, scale, torch.float32)
    assert (found - row).square().sum() < 0.1 * ((row * 127).round() / 127 - row).square().sum()


def test_rows_at_the_ends_of_the_range_keep_a_scale_above_zero() -> None:
    rows = torch.zeros(3, 8)
    rows[1] = 1e-45
    rows[2] = 1e38
    codes, scale = quantise_rows(rows, torch.bfloat16)
    assert (scale >= torch.finfo(torch.bfloat16).tiny).all()
    assert scale.isfinite().all()
    assert not codes[0].any()
    assert ((dequantise_rows(codes, scale, torch.float32)[2] - 1e38).abs() < 1e36).all()


def test_weights_that_are_not_finite_are_refused() -> None:
    rows = torch.zeros(3, 8)
    rows[1, 2], rows[2, 2] = math.inf, math.nan
    with pytest.raises(ValueError, match="2 rows hold weights that are not finite"):
        quantise_rows(rows, torch.float32)
