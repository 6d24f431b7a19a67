"""Which products run on skinny_gemm instead of cuBLAS, and how: data, replaced whole by what a measurement prints."""

from collections.abc import Mapping

from memsvc.device.kernels.skinny_tiles import SkinnyPlan

__all__ = ["CHOICES", "SOURCE", "Choices"]

Choices = Mapping[tuple[str, int, int], tuple[tuple[int, SkinnyPlan | None], ...]]
"""(ending, rows of the weight, columns of it) -> (most rows of x, plan) ascending; no plan, more rows or no entry: cuBLAS.

ending: plain, gated or norm, as linear_backends has them."""

SOURCE = "not measured yet, so cuBLAS everywhere; python -m tests.bench.skinny prints this table for an H200"
"""Where CHOICES comes from."""

CHOICES: Choices = {}
