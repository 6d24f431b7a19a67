"""The products of three models' steps, and the variants of skinny_gemm that are worth a try for each."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from memsvc.device.kernels.launch import cut
from memsvc.device.kernels.skinny_tiles import MULTIPROCESSORS, Cut, SkinnyPlan, default_plan
from memsvc.device.layers import Linear, RMSNorm
from memsvc.device.linear_backends import GATED, NORM, PLAIN, AddNorm, Epilogue, Gated, apply

DTYPE, ITEM = torch.bfloat16, 2
ROWS = (8, 9, 16, 18, 32, 36, 64, 72, 128, 144, 288)
SEARCHED = {8: 9, 9: 9, 16: 9, 18: 18, 32: 18, 36: 36, 64: 36, 72: 72, 128: 72, 144: 144, 288: 288}
"""Rows -> the rows at which all variants are tried; elsewhere the best of those."""

_COLD_BYTES = 250 << 20
"""Of distinct weights in turn: what the L2 cache of an H200, 50 MB, can't hold between two uses."""
_SHARED_BYTES, _ACCUMULATORS = 227 << 10, 128


@dataclass(frozen=True, slots=True)
class Product:
    """One GEMM with what follows it."""

    n: int
    """Rows of the weight."""
    k: int
    ending: str = PLAIN

    @property
    def key(self) -> tuple[str, int, int]:
        """As the table has it."""
        return self.ending, self.n, self.k

    @property
    def columns(self) -> int:
        """That plans cut: of either half, if gated."""
        return self.n // 2 if self.ending == GATED else self.n

    def num_bytes(self, m: int) -> int:
        """The weight, x and the result; the residual read and written, and the norm, after AddNorm."""
        out = {PLAIN: self.n, GATED: self.n // 2, NORM: 3 * self.n}[self.ending]
        return ITEM * (self.n * self.k + m * (self.k + out))


@dataclass(frozen=True, slots=True)
class Model:
    """name -> (times a step, product)."""

    products: dict[str, tuple[int, Product]]


MODELS = {
    "qwen3-8b verify": Model(
        {
            "qkv": (36, Product(6144, 4096)),
            "o": (36, Product(4096, 4096, NORM)),
            "gate_up": (36, Product(24576, 4096, GATED)),
            "down": (36, Product(4096, 12288, NORM)),
            "head": (1, Product(151936, 4096)),
        }
    ),
    "qwen3-8b-dflash propose": Model(
        {
            "fc": (1, Product(4096, 20480)),
            "context_kv": (1, Product(10240, 4096)),
            "qkv": (5, Product(6144, 4096)),
            "o": (5, Product(4096, 4096, NORM)),
            "gate_up": (5, Product(24576, 4096, GATED)),
            "down": (5, Product(4096, 12288, NORM)),
            "head": (1, Product(151936, 4096)),
        }
    ),
    "qwen38-27b-dflash2 propose": Model(
        {
            "fc": (1, Product(5120, 25600)),
            "context_kv": (1, Product(10240, 5120)),
            "conv taps": (10, Product(1280, 5120)),
            "qkv": (5, Product(6144, 5120)),
            "o": (5, Product(5120, 4096)),
            "gate_up": (5, Product(34816, 5120, GATED)),
            "down": (5, Product(5120, 17408)),
            "head": (1, Product(248320, 5120)),
        }
    ),
}
PRODUCTS = tuple(dict.fromkeys(product for model in MODELS.values() for _, product in model.products.values()))


def variants(product: Product, m: int) -> list[SkinnyPlan]:
    """Plans to try for m rows, the one by reasoning first."""
    sizes = m, product.columns, product.k
    found = [default_plan(*sizes), *_shapes(m)]
    for plan, programs in itertools.product(_shapes(m), (2, 4)):
        if not plan.streams:
            units = cut(product.columns, plan.block_n) * cut(m, 128)
            splits = min(cut(programs * MULTIPROCESSORS, units), cut(product.k, 2 * plan.block_k), 16)
            found.append(replace(plan, splits=splits))
    return [plan for plan in dict.fromkeys(found) if _fits(plan, product, m) and _is_busy(plan, sizes)]


def _shapes(m: int) -> Iterator[SkinnyPlan]:
    if m <= 32:
        yield SkinnyPlan(32, 128, num_stages=5)
        for tma in (False, True):
            yield SkinnyPlan(64, 128, num_stages=4, tma=tma)
            yield SkinnyPlan(64, 64, num_stages=6, tma=tma)
            yield SkinnyPlan(64, 128, streams=2, num_stages=4, tma=tma)
            yield SkinnyPlan(128, 64, streams=1, num_stages=7, num_warps=8, tma=tma)
        yield SkinnyPlan(128, 64, num_stages=4, num_warps=8)
    else:
        for tma in (False, True):
            yield SkinnyPlan(64, 64, num_stages=5, tma=tma)
            yield SkinnyPlan(128, 64, num_stages=4, num_warps=8, tma=tma)
            yield SkinnyPlan(128, 64, streams=1, num_stages=6, num_warps=8, tma=tma)
        yield SkinnyPlan(256, 64, num_stages=4, num_warps=8, tma=True)


def _fits(plan: SkinnyPlan, product: Product, m: int) -> bool:
    halves = 2 if product.ending == GATED else 1
    rows = Cut.of(plan, (m, 64, 64), MULTIPROCESSORS).rows
    shared = (plan.block_n * halves + rows) * plan.block_k * ITEM * plan.num_stages
    held = plan.block_n * halves * rows // (32 * plan.num_warps)
    return shared < _SHARED_BYTES and held <= _ACCUMULATORS


def _is_busy(plan: SkinnyPlan, sizes: tuple[int, int, int]) -> bool:
    """Enough programs to be worth a try, and no more to a unit than can be added up."""
    try:
        return Cut.of(plan, sizes, MULTIPROCESSORS).programs >= MULTIPROCESSORS * 2 // 3
    except ValueError:
        return False


class Operands:
    """Weights of one product in turn, and rows."""

    def __init__(self, product: Product, device: str) -> None:
        self.product, self.device = product, device
        num_bytes = ITEM * product.n * product.k
        copies = max(1, cut(_COLD_BYTES, num_bytes)) if device != "cpu" else 1
        self.layers = [Linear(self.fill(product.n, product.k, scale=product.k**-0.5)) for _ in range(copies)]
        self.norm = RMSNorm(self.fill(product.n), 1e-6)

    def fill(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random values; none on a CPU, where kernels are compiled only."""
        made = torch.empty(shape, dtype=DTYPE, device=self.device)
        return made if self.device == "cpu" else made.normal_(std=scale)

    def epilogue(self, m: int) -> Epilogue:
        """With a residual of its own."""
        if self.product.ending == NORM:
            return AddNorm(residual=self.fill(m, self.product.n), norm=self.norm)
        return Gated() if self.product.ending == GATED else None

    def run(self, plan: SkinnyPlan | None, x: torch.Tensor, epilogue: Epilogue, turn: int = 0) -> torch.Tensor:
        """The product, normed or gated if that is its ending."""
        made = apply(plan, x, self.layers[turn % len(self.layers)], epilogue)
        return made[0] if isinstance(made, tuple) else made
