"""How parameters move: Muon or AdamW on matrices, AdamW on the rest, and the moments that a state keeps."""

from collections.abc import Mapping

import torch

from target_worker.train.muon import Muon
from target_worker.train.run_config import MUON, RunConfig

_ADAM_MOMENTS, _MUON_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum",)
_NO_MATRICES = ("codebook", "embed_tokens.weight")
"""Ends of names of tables: their rows are looked up, so they move one by one and do not decay."""


class Optimizer:
    """The optimisers of one set of parameters, by name."""

    def __init__(self, params: Mapping[str, torch.Tensor], config: RunConfig) -> None:
        self._params = params
        matrices = {name for name, tensor in params.items() if tensor.dim() == 2 and not name.endswith(_NO_MATRICES)}
        self._by_muon = matrices if config.optimizer == MUON else set()
        groups = [
            {"params": [params[name] for name in names], "weight_decay": decay}
            for names, decay in (
                ([name for name in params if name in matrices - self._by_muon], config.weight_decay),
                ([name for name in params if name not in matrices], 0.0),
            )
            if names
        ]
        self._is_cuda = next(iter(params.values())).device.type == "cuda"
        self._all: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=self._is_cuda)
        ]
        if self._by_muon:
            taken = [tensor for name, tensor in params.items() if name in self._by_muon]
            self._all.append(Muon(taken, config.lr, weight_decay=config.weight_decay))

    def step(self, lr: float) -> None:
        """One update at this learning rate; gradients are gone after it."""
        for part in self._all:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
            part.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, torch.Tensor]:
        """Everything to go on from, as kind.name. There is none before the first step."""
        return {
            f"{kind}.{name}": self._of(name).state[tensor][kind]
            for name, tensor in self._params.items()
            for kind in self._kinds(name)
        }

    def moment_names(self) -> list[str]:
        """The names of moments()."""
        return [f"{kind}.{name}" for name in self._params for kind in self._kinds(name)]

    def restore(self, moments: Mapping[str, torch.Tensor], step: int) -> None:
        """Go on from moments after `step` updates."""
        for name, tensor in self._params.items():
            held = {kind: moments[f"{kind}.{name}"].to(tensor.device) for kind in self._kinds(name)}
            if name not in self._by_muon:
                # AdamW corrects for the first steps, and counts them where its kernel reads.
                held["step"] = torch.tensor(float(step), device=tensor.device if self._is_cuda else "cpu")
            self._of(name).state[tensor] = held

    def _of(self, name: str) -> torch.optim.Optimizer:
        return self._all[name in self._by_muon]

    def _kinds(self, name: str) -> tuple[str, ...]:
        return _MUON_MOMENTS if name in self._by_muon else _ADAM_MOMENTS
