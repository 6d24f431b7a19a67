"""States and rings of a hybrid target on a device: how its linear layers run over blocks, and how states catch up."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memsvc.device.kernels.delta_memory import DeltaMemory, move_states
from memsvc.device.kernels.delta_site import DeltaSite
from memsvc.device.kernels.delta_verify import delta_verify
from memsvc.device.kernels.places import BlockRows
from memsvc.device.slots import Stage
from memsvc.device.state_mirror import StateMirror
from target_worker.linear_memory import LinearMemory
from target_worker.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class DeviceStates:
    """The memory of all linear layers, as the host and as kernels see it."""

    linear: LinearMemory
    """Its table is the host's."""
    memory: DeltaMemory
    mirror: StateMirror
    sites: list[DeltaSite]
    """A linear layer each."""

    @classmethod
    def of(cls, arena: torch.Tensor, linear: LinearMemory, model: Decoder, page_size: int) -> "DeviceStates":
        """arena: the one that linear lies in. Raises ValueError if kernels can't do the layers, with the numbers."""
        mirror = StateMirror(linear.table, arena.device)
        states, rings = linear.states, linear.rings
        memory = DeltaMemory(
            arena, (states.kind, states.shape), (rings.kind, rings.shape), mirror.tables, page_size=page_size
        )
        sites = [
            DeltaSite(memory=memory, layer=number, conv=layer.conv) for number, layer in enumerate(model.delta_layers)
        ]
        return cls(linear, memory, mirror, sites)

    def move(self, rows: BlockRows) -> None:
        """All layers have run over these blocks, and lengths are as they were."""
        move_states(rows, self.memory)

    def catch_up(self, slots: Sequence[int], lengths: Sequence[int], block_size: int, stage: Stage) -> None:
        """Enqueue what brings the states of slots to the last page edge of these lengths, from the rings alone.

        None of them may be past that edge. That a slot is done does not matter. block_size: of the verifies.
        """
        table = np.zeros(len(self.memory.tables.state_len), dtype=np.int32)
        table[list(slots)] = lengths
        members, lens = stage(np.array(slots, dtype=np.int32)), stage(table)
        # Blocks of rows that change nothing, run by the kernels that verify compiles anyway. In the ring they have the
        # places of the next rows to come.
        rows = BlockRows(members=members, lengths=lens, block_size=block_size, done=torch.zeros_like(lens))
        state, device = self.memory.state, self.memory.recurrent.device
        raw = torch.zeros((rows.num_rows, state.conv_dim), dtype=state.dtype, device=device)
        gates = torch.zeros((rows.num_rows, 2, state.num_heads), device=device)
        for site in self.sites:
            delta_verify(raw, gates, rows, site)
        self.move(rows)


class BlockRecur:
    """The linear layers over the verify blocks of one bucket."""

    def __init__(self, states: DeviceStates, rows: BlockRows) -> None:
        self._states = states
        self._rows = rows

    def __call__(self, layer: int, raw: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """See RecurRows."""
        return delta_verify(raw, gates, self._rows, self._states.sites[layer])

    def finish(self) -> None:
        """All layers have run, and lengths are as they were."""
        self._states.move(self._rows)
