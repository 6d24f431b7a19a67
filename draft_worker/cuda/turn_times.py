"""--spec-trace 2: device times of the draft's turns, one line a turn."""

import logging
from dataclasses import dataclass, field

import torch

from draft_worker.cuda.network import FWD, HEAD, MEM, SECTIONS, SELECT
from memsvc.device.section_times import SectionTimes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTime:
    """One traced turn that has ended. Microseconds on the device."""

    number: int = 0
    us: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    """By section; of a route that repeats sections, their sums."""


class TurnTimes(SectionTimes):
    """Times of turns, and the newest one for the target."""

    def __init__(self, lengths: torch.Tensor) -> None:
        """lengths: SlotState.length."""
        super().__init__(lengths, SECTIONS)
        self.newest = TurnTime()

    def collect(self) -> None:
        """Log every turn that has ended since the last call."""
        for done in self.take_ended():
            us = done.us
            self.newest = TurnTime(number=done.number, us=us)
            logger.info(
                "[spec-phase-dev] n=%d ctx=%d fwd=%d head=%d select=%d mem=%d wait=%d",
                done.num_members, done.context, us[FWD], us[HEAD], us[SELECT], us[MEM],
                done.wait_us,
            )  # fmt: skip
