"""The gated delta rule over sequences of any lengths that lie one after another: by torch, or by fla-core's kernels.

fla-core (flash-linear-attention's operators, MIT) is optional: where it is not installed, or can't do a case, the form
of memsvc.device.gated_delta runs, on any device.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from memsvc.device.gated_delta import DeltaRows, core_of, gated_delta_rule_to_end, grouped
from memsvc.device.slots import Stage

_FLA_CONFIGS = Path(__file__).parent / "fla_configs"
"""A configuration for each of its kernels: from its own lists, without spills, and for devices with 96 KiB a program."""

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


def choose_rule(dtype: torch.dtype, device: torch.device) -> PlanRule:
    """What is used for a model of that dtype."""
    # Of float32 its kernels multiply the first ten bits: such a model is there for its numbers.
    if device.type == "cuda" and dtype.itemsize == 2 and importlib.util.find_spec("fla") is not None:
        return FlaRule(dtype)
    return TorchRule()


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


class FlaRule:
    """chunk_gated_delta_rule of fla-core, for models of two bytes a number on a CUDA device."""

    name = "fla"

    def __init__(self, dtype: torch.dtype, rule: Callable[..., Any] | None = None) -> None:
        """rule: in the place of fla-core's."""
        self.dtype = dtype
        self._rule = rule or _import_rule()

    def __call__(self, lens: Sequence[int], stage: Stage) -> Rule:
        """See PlanRule."""
        ends = np.cumsum([0, *lens]).astype(np.int64)
        # From the copy on the host it makes its index of chunks. It would wait for the device otherwise.
        on_host, on_device = torch.from_numpy(ends), stage(ends)

        def run(rows: DeltaRows, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._rule(
                rows.q, rows.k, rows.v, rows.g, rows.beta, scale=rows.k.shape[-1] ** -0.5, initial_state=state,
                output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=on_device, cu_seqlens_cpu=on_host,
            )  # fmt: skip

        return run


def _import_rule() -> Callable[..., Any]:
    # Else it compiles and times 59 configurations at its first call: half a minute of a core, to choose what is best for
    # a prompt of one token; and 25 more for each further size of prompts. FLA_CACHE_MODE=disabled lets it do so.
    os.environ.setdefault("FLA_CONFIG_DIR", str(_FLA_CONFIGS))
    os.environ.setdefault("FLA_CACHE_MODE", "default")
    # Under a name of its own, since checkers do without the package.
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
