"""Tensors without numbers or memory, for loading a model of any size by names and shapes alone."""

from collections.abc import Mapping

import torch


class MetaSource:
    """Stands for a checkpoint of those names and shapes; asked for another, it fails."""

    def __init__(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        self.sizes = sizes
        self.asked: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.sizes

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert self.sizes[name] == shape, name
        assert name not in self.asked, f"{name} is read twice"
        self.asked.add(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def unused(self) -> list[str]:
        return sorted(self.sizes.keys() - self.asked)
