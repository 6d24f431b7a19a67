"""The gated delta rule over sequences of any lengths that lie one after another: which way to compute it is taken.

FlashInfer's kernels and fla-core (flash-linear-attention's operators, MIT) are optional: where neither is there, or can
do a model, the form of memsvc.device.gated_delta runs, on any device.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memsvc.device import fla_delta, flashinfer_delta
from memsvc.device.delta_plan import DeltaHeads, PlanRule, Rule
from memsvc.device.fla_delta import FlaRule
from memsvc.device.flashinfer_delta import FlashInferRule
from memsvc.device.gated_delta import DeltaRows, core_of, gated_delta_rule_to_end, grouped
from memsvc.device.slots import Stage

__all__ = ["PREFERRED", "FlaRule", "FlashInferRule", "PlanRule", "Rule", "TorchRule", "choose_rule", "lacks"]

logger = logging.getLogger(__name__)

PREFERRED = ("flashinfer", "fla", "torch")
"""The first that can be had is taken; torch can always."""


def choose_rule(dtype: torch.dtype, device: torch.device, heads: DeltaHeads) -> PlanRule:
    """What is used for a model of that dtype. Logs what would be preferred and can't be had."""
    makers: dict[str, Callable[[], PlanRule]] = {
        "flashinfer": lambda: FlashInferRule(device, heads.num_v_heads),
        "fla": lambda: FlaRule(dtype),
        "torch": TorchRule,
    }
    for name in PREFERRED:
        reason = lacks(name, dtype, device, heads)
        if reason is None:
            return makers[name]()
        logger.info("gated delta nets prompts=%s can't be had: %s", name, reason)
    raise AssertionError(f"none of {PREFERRED} can be had: torch always can")


def lacks(name: str, dtype: torch.dtype, device: torch.device, heads: DeltaHeads) -> str | None:
    """Why one of PREFERRED can't be had for such a model here, or None."""
    if name == "flashinfer":
        return flashinfer_delta.lacks(dtype, device, heads)
    return fla_delta.lacks(dtype, device, heads) if name == "fla" else None


class TorchRule:
    """Sequences of about the same length are padded and computed together."""

    name = "torch"
    dtype = torch.float32

    def __call__(self, lens: Sequence[int], stage: Stage) -> Rule:
        """See PlanRule."""
        return _Padded([_Group.of(lens, places, stage) for places in grouped(lens)])


@dataclass(frozen=True, slots=True)
class _Group:
    chunk: int
    num_rows: int
    members: torch.Tensor
    """int64 [n]: sequences,"""
    source: torch.Tensor
    """int64 [r]: their rows,"""
    target: torch.Tensor
    """int64 [r]: and where these stand among n * num_rows."""

    @classmethod
    def of(cls, lens: Sequence[int], places: list[int], stage: Stage) -> "_Group":
        chunk, num_rows = core_of(lens[places[0]])
        firsts = np.cumsum([0, *lens])
        source = np.concatenate([np.arange(firsts[place], firsts[place] + lens[place]) for place in places])
        target = np.concatenate([np.arange(lens[place]) + i * num_rows for i, place in enumerate(places)])
        parts = [np.asarray(part, dtype=np.int64) for part in (places, source, target)]
        return cls(chunk, num_rows, *stage(np.concatenate(parts)).split([len(part) for part in parts]))

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Its rows of x [1, t, ..] as [n, num_rows, ..], zeros behind the end of each."""
        form = x.shape[2:]
        out = x.new_zeros((len(self.members) * self.num_rows, *form))
        out.index_copy_(0, self.target, x[0].index_select(0, self.source))
        return out.view(len(self.members), self.num_rows, *form)


@dataclass(frozen=True, slots=True)
class _Padded:
    """A Rule."""

    groups: list[_Group]

    def __call__(self, rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(rows.v)
        for group in self.groups:
            own = DeltaRows(*(group.padded(x) for x in (rows.q, rows.k, rows.v, rows.g, rows.beta)))
            # A row of zeros changes no state, so those behind the end of a sequence may be taken in.
            got, ends = gated_delta_rule_to_end(own, state.index_select(0, group.members), group.chunk)
            out[0].index_copy_(0, group.source, got.flatten(0, 1).index_select(0, group.target))
            state.index_copy_(0, group.members, ends)
        return out, state
