"""Where a hybrid target's linear layers have their states and rings."""

from dataclasses import dataclass

import torch

from memsvc.device.ring_pool import RingPool, RingShape
from memsvc.device.state_pool import StatePool, StateShape
from memsvc.device.state_table import StateTable
from memsvc.wire.mem import Layout
from target_worker.model.config import RING, STATE
from target_worker.model.decoder import Decoder
from target_worker.model.linear_spec import RING_PAGES, ring_page_rows


@dataclass(frozen=True, slots=True)
class LinearMemory:
    """Pages of both kinds, and whose they are."""

    states: StatePool
    rings: RingPool
    table: StateTable

    @classmethod
    def of_layout(
        cls,
        arena: torch.Tensor,
        layout: Layout,
        model: Decoder,
        *,
        max_reqs: int,
        block_size: int,
        state_dtype: str = "float32",
    ) -> "LinearMemory | None":
        """Over an arena, uint8 [arena_bytes], laid out with the kinds of kind_specs; None if no layer is linear.

        Raises ValueError if the layout lacks a kind or its pages are of another size.
        """
        spec = model.shape.linear
        if spec is None:
            return None
        kinds = {kind.name: kind for kind in layout.kinds}
        missing = sorted({STATE, RING} - set(kinds))
        if missing:
            raise ValueError(f"a hybrid target needs the kinds {missing}, the pool has {sorted(kinds)}")
        state = StateShape(
            num_heads=spec.num_v_heads,
            k_dim=spec.k_dim,
            v_dim=spec.v_dim,
            conv_rows=spec.conv_kernel - 1,
            conv_dim=spec.conv_dim,
            dtype=model.dtype,
            recurrent_dtype=getattr(torch, state_dtype),
        )
        ring = RingShape(
            page_rows=ring_page_rows(layout.page_size, block_size),
            num_pages=RING_PAGES,
            num_heads=spec.num_v_heads,
            conv_dim=spec.conv_dim,
            dtype=model.dtype,
        )
        table = StateTable(max_reqs=max_reqs, num_layers=model.shape.num_linear_layers, ring_pages=RING_PAGES)
        return cls(StatePool(arena, kinds[STATE], state), RingPool(arena, kinds[RING], ring), table)
