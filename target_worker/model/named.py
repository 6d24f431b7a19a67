"""Weights of one layer by their names below a prefix."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from memsvc.device.checkpoint import Form, TensorSource
from memsvc.device.fp8 import Rows, arrange, made_linear
from memsvc.device.layers import GatedMlp, Linear, RMSNorm, ZeroCentredRMSNorm, activation
from target_worker.model.config import TargetShape


class Named:
    """A source for one target, of which the tensors below a name prefix are asked for."""

    def __init__(
        self,
        source: TensorSource,
        wanted: Mapping[str, Form],
        shape: TargetShape,
        dtype: torch.dtype,
        fp8: Collection[str] = (),
        prefix: str = "",
    ) -> None:
        """wanted: shape of every tensor of the target by its whole name. fp8: those that are kept in 8 bits."""
        self.source, self.wanted, self.shape, self.dtype, self.prefix = source, wanted, shape, dtype, prefix
        self._fp8 = fp8

    def below(self, prefix: str) -> "Named":
        """The same with names that go on from there."""
        return Named(self.source, self.wanted, self.shape, self.dtype, self._fp8, self.prefix + prefix)

    def wants(self, name: str) -> bool:
        """The target has a tensor of that name."""
        return self.prefix + name in self.wanted

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor, in the model's dtype or the one given."""
        whole = self.prefix + name
        return self.source.get(whole, self.wanted[whole], dtype or self.dtype)

    def matrix(self, name: str) -> Rows:
        """The weight of a projection, in 8 bits if it is kept so."""
        whole = f"{self.prefix}{name}.weight"
        if whole not in self._fp8:
            return self.get(f"{name}.weight")
        return self.source.get_fp8(whole, self.wanted[whole], self.dtype)

    def linear(self, *names: str) -> Linear:
        """One matrix of the projections stacked in order, with their biases if they have any."""
        has_bias = self.wants(f"{names[0]}.bias")
        return self.stacked(
            lambda *parts: parts[0] if len(parts) == 1 else torch.cat(parts),
            [self.matrix(name) for name in names],
            torch.cat([self.get(f"{name}.bias") for name in names]) if has_bias else None,
        )

    def stacked(
        self, made: Callable[..., torch.Tensor], parts: Sequence[Rows], bias: torch.Tensor | None = None
    ) -> Linear:
        """One matrix of those, whose rows `made` puts in order."""
        try:
            return made_linear(arrange(made, *parts), bias)
        except ValueError as error:
            raise ValueError(f"a matrix of {self.prefix.removesuffix('.')} cannot be kept in fp8: {error}") from error

    def norm(self, name: str) -> RMSNorm:
        """A norm of the kind that the family has."""
        make = ZeroCentredRMSNorm if self.shape.is_hybrid_family else RMSNorm
        return make(self.get(f"{name}.weight"), self.shape.rms_norm_eps)

    def mlp(self) -> GatedMlp:
        """The layer's MLP."""
        gate_up, down = self.linear("mlp.gate_proj", "mlp.up_proj"), self.linear("mlp.down_proj")
        return GatedMlp(gate_up, down, activation(self.shape.hidden_act))
