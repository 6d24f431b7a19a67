"""What a way to compute the gated delta rule over prompts has to be: planned once a step, then run in every layer."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from memsvc.device.gated_delta import DeltaRows
from memsvc.device.slots import Stage

Rule = Callable[[DeltaRows, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""rule(rows [1, t, ..], state [n, v_heads, k_dim, v_dim] float32) -> (outputs [1, t, v_heads, v_dim], states at the ends).

state may be overwritten."""


class PlanRule(Protocol):
    """A way to compute it."""

    name: str
    dtype: torch.dtype
    """Of q, k and v, and of the outputs. g, beta and states are float32."""

    def __call__(self, lens: Sequence[int], stage: Stage) -> Rule:
        """For n sequences of so many rows each, at least one. The host waits for nothing, also later."""
        ...


class DeltaHeads(Protocol):
    """The heads of a gated delta net, as a target's LinearSpec has them."""

    @property
    def num_k_heads(self) -> int:
        """Of q and k."""
        ...

    @property
    def num_v_heads(self) -> int:
        """Of v, gates, states and outputs."""
        ...

    @property
    def k_dim(self) -> int:
        """Numbers of a key."""
        ...

    @property
    def v_dim(self) -> int:
        """Numbers of a value."""
        ...
