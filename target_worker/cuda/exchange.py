"""The exchange of a CUDA arena as the target sees it: rows of features, and the slots with the hand-over words."""

from dataclasses import dataclass

import torch

from memsvc.device.fixed_frames import ExchangeLayout
from memsvc.device.slots import SlotState
from memsvc.slot_layout import SlotLayout
from memsvc.wire.spec import ExchangeMap
from target_worker.base import Base


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Views of the arena."""

    slots: SlotState
    features: torch.Tensor | None
    """[rows, taps * hidden]; None without taps."""
    map: ExchangeMap
    """Where the draft finds both."""

    @classmethod
    def of(cls, base: Base) -> "Exchange":
        """Nobody is in any slot, and both words are 0. Raises ValueError if the layout has it in another size."""
        config = base.config
        slots = SlotLayout(config.max_running_requests, config.block_size, base.model.shape.vocab_size)
        parts = ExchangeLayout(feature_bytes=base.feature_bytes, slot_bytes=slots.num_bytes)
        if parts.num_bytes != base.layout.exchange_bytes:
            raise ValueError(
                f"{config.sizes.feature_rows} rows of features and {slots.num_slots} slots need"
                f" {parts.num_bytes} bytes, the exchange has {base.layout.exchange_bytes}"
            )
        state = SlotState(slots, base.exchange[parts.slots : parts.slots + slots.num_bytes])
        state.reset()
        return cls(
            slots=state,
            features=base.feature_rows(parts.feature_bytes) if base.feature_width else None,
            map=ExchangeMap(
                slots=parts.slots, num_slots=slots.num_slots, features=0, num_rows=config.sizes.feature_rows
            ),
        )
