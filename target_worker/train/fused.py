"""Chains of small operations as one kernel on a GPU, where each of them would pass over gigabytes."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

_TOLERANCE = 3e-2
"""Largest difference, as a share of the largest value, that another order of roundings in bfloat16 explains."""


class Fused:
    """A function of tensors, compiled at its first call of a kind on a GPU if it gives the same numbers; else as it is.

    Its result is a tensor or a tuple of tensors and None. Calls are of a kind if their arguments have the
    same numbers of dimensions and ask for gradients alike.
    """

    def __init__(self, function: Callable[..., Any], *, moving: int, dims: int = 1, frozen: bool = False) -> None:
        """moving: so many of the first arguments change in their first `dims` dimensions from call to call.

        frozen: no gradient is asked for in training either; other functions stay as they are where none is.
        """
        self._function = function
        self._moving = moving
        self._dims = dims
        self._frozen = frozen
        self._chosen: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """What the function gives."""
        if args[0].device.type != "cuda" or not (self._frozen or torch.is_grad_enabled()):
            return self._function(*args)
        self._let_move(args)
        kind = tuple((part.dim(), part.requires_grad) for part in args if isinstance(part, torch.Tensor))
        if kind not in self._chosen:
            self._chosen[kind] = self._choose(args)
        return self._chosen[kind](*args)

    def _choose(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """The compiled function if it agrees on these arguments, forward and backward."""
        name = getattr(self._function, "__name__", "function")
        try:
            compiled = torch.compile(self._function)
            error = _difference(self._tried(compiled, args), self._tried(self._function, args))
        except Exception as reason:
            # Whatever a compiler may raise: without it training is slower, not wrong.
            logger.warning("%s is not compiled: %s", name, str(reason)[:300])
            return self._function
        logger.info("compiled %s error=%.5f", name, error)
        return compiled if error < _TOLERANCE else self._function

    def _let_move(self, args: Sequence[Any]) -> None:
        """Ask for code that holds for any size, where it can be had."""
        from torch._dynamo import maybe_mark_dynamic

        for part in args[: self._moving]:
            if isinstance(part, torch.Tensor):
                maybe_mark_dynamic(part, list(range(self._dims)))

    def _tried(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Results, then gradients of a weighted sum of them."""
        # Not copied: what is compiled holds for these strides.
        copies = [
            part.detach().requires_grad_(part.requires_grad) if isinstance(part, torch.Tensor) else part
            for part in args
        ]
        self._let_move(copies)
        found = function(*copies)
        results = [part for part in (found if isinstance(found, tuple) else [found]) if part is not None]
        moving = [result for result in results if result.requires_grad]
        if moving:
            generator = torch.Generator(args[0].device).manual_seed(0)
            weights = [
                torch.rand(part.shape, generator=generator, device=part.device).to(part.dtype) for part in moving
            ]
            torch.autograd.backward(moving, weights)
        gradients = [part.grad for part in copies if isinstance(part, torch.Tensor) and part.grad is not None]
        return [result.detach() for result in results] + gradients


def _difference(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Largest difference of two results, as a share of the largest value of each tensor."""
    shares = [0.0]
    for one, other in zip(some, others, strict=True):
        top = other.abs().max().float().clamp(min=1e-6)
        shares.append(((one - other).abs().max().float() / top).item())
    return max(shares)
