"""Muon: momentum whose every matrix is made nearly orthogonal before it is taken as the step.

Formulas as published by K. Jordan (2024), the scale of the step as by the Moonlight report (2025).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the odd polynomial that pulls singular values towards 1."""
_ROUNDS = 5
_RMS = 0.2
"""Root mean square of a step over the learning rate, as AdamW's is: one learning rate suits both."""


class Muon(torch.optim.Optimizer):
    """For matrices alone: embeddings, codebooks and vectors want another optimiser."""

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters with a gradient; state: momentum, as the parameter."""
        assert closure is None, "the loss is computed once"
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            smoothed = [self._smoothed(param, group["momentum"]) for param in params]
            for param, step in zip(params, orthogonal(smoothed), strict=True):
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(step, alpha=-group["lr"] * _RMS * max(param.shape) ** 0.5)

    def _smoothed(self, param: torch.Tensor, momentum: float) -> torch.Tensor:
        """Nesterov's look ahead, after the gradient went into the momentum."""
        assert param.grad is not None
        held = self.state[param]
        if not held:
            held["momentum"] = torch.zeros_like(param)
        held["momentum"].lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(held["momentum"], momentum)


def orthogonal(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each matrix with its singular values brought near 1. Those of like shape are computed together, in bfloat16."""
    wide = [matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t() for matrix in matrices]
    places: dict[torch.Size, list[int]] = {}
    for place, matrix in enumerate(wide):
        places.setdefault(matrix.shape, []).append(place)
    made: dict[int, torch.Tensor] = {}
    for alike in places.values():
        made |= zip(alike, _newton_schulz(torch.stack([wide[place] for place in alike])), strict=True)
    turned = [made[place] for place in range(len(wide))]
    return [part if part.shape == matrix.shape else part.t() for part, matrix in zip(turned, matrices, strict=True)]


def _newton_schulz(x: torch.Tensor) -> torch.Tensor:
    """float32 of x [n, rows, columns], rows <= columns."""
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    x = x.bfloat16()
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.float()
