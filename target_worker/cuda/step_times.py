"""--spec-trace 2: device times of the target's steps beside the draft's, one line a step."""

import logging
from collections.abc import Callable, Sequence

import torch

from memsvc.device.section_times import SectionTimes
from memsvc.wire.spec import Planned
from target_worker.cuda.verify_step import ACCEPT, HEAD, SECTIONS, VERIFY

logger = logging.getLogger(__name__)

PROMPTS = "prompts"
"""The section after those of the blocks: prompt chunks, and the first tokens of those that end."""
_NOTHING = Planned(0)


class StepTimes(SectionTimes):
    """Times of steps. verify is the target's layers, target_head its output head; the other head is the draft's.

    prompts is 0 in a step without chunks, n in one without blocks. Blocks that are computed in one forward with
    prompts are in prompts, and verify is 0.
    """

    def __init__(self, lengths: torch.Tensor) -> None:
        """lengths: SlotState.length."""
        super().__init__(lengths, (*SECTIONS, PROMPTS))
        self._num_steps = 0
        self.draft: Callable[[], Planned | None] = lambda: None
        """The draft's newest reply, with the times of the newest turn that it knows of."""

    def start(self, members: Sequence[int]) -> None:
        """A step with blocks of these slots goes on the current stream now. Logs the steps that have ended."""
        for done in self.take_ended():
            us, draft = done.us, self.draft() or _NOTHING
            logger.info(
                "[spec-phase-dev] n=%d ctx=%d fwd=%d head=%d select=%d verify=%d accept=%d mem=%d target_head=%d"
                " prompts=%d wait=%d",
                done.num_members, done.context, draft.fwd_us, draft.head_us, draft.select_us,
                us[VERIFY], us[ACCEPT], draft.mem_us, us[HEAD], us[PROMPTS], done.wait_us,
            )  # fmt: skip
        self._num_steps += 1
        self.begin(self._num_steps, members)
