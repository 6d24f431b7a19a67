"""Weights of one layer by their names below a prefix."""

import torch

from memsvc.device.checkpoint import TensorSource
from memsvc.device.layers import GatedMlp, Linear, RMSNorm, ZeroCentredRMSNorm, activation
from target_worker.model.config import TargetShape


class Named:
    """A source below a name prefix, for one target."""

    def __init__(self, source: TensorSource, prefix: str, shape: TargetShape, dtype: torch.dtype) -> None:
        self.source, self.prefix, self.shape, self.dtype = source, prefix, shape, dtype

    def has(self, name: str) -> bool:
        """The source holds it."""
        return self.source.has(self.prefix + name)

    def get(self, name: str, *form: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of that form, in the model's dtype or the one given."""
        return self.source.get(self.prefix + name, form, dtype or self.dtype)

    def linear(self, names: dict[str, int], num_in: int, bias: bool = False) -> Linear:
        """One matrix of the projections stacked in order; names give each one's number of outputs."""
        weights = [self.get(f"{name}.weight", num_out, num_in) for name, num_out in names.items()]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = torch.cat([self.get(f"{name}.bias", n) for name, n in names.items()]) if bias else None
        return Linear(weight, biases).pack()

    def norm(self, name: str, size: int) -> RMSNorm:
        """A norm of the kind that the family has."""
        make = ZeroCentredRMSNorm if self.shape.is_hybrid_family else RMSNorm
        return make(self.get(f"{name}.weight", size), self.shape.rms_norm_eps)

    def mlp(self) -> GatedMlp:
        """The layer's MLP."""
        shape = self.shape
        gate_up = {"mlp.gate_proj": shape.intermediate_size, "mlp.up_proj": shape.intermediate_size}
        return GatedMlp(
            self.linear(gate_up, shape.hidden_size, shape.mlp_bias),
            self.linear({"mlp.down_proj": shape.hidden_size}, shape.intermediate_size, shape.mlp_bias),
            activation(shape.hidden_act),
        )
