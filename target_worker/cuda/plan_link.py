"""Talks to a draft on the device: one Plan a step, answered when it is enqueued, and what happens when it is gone.

The target's stream waits for the draft's word, so a draft that dies or refuses is replaced by the host: it says that
nothing was drafted and writes the word itself (CudaLane.hand_over_without_peer).
"""

from typing import Protocol

import torch

from memsvc.device.lane import Lane
from memsvc.rpc import Rpc
from memsvc.wire.spec import DraftReady, Plan, Planned
from target_worker.draft_peer import DraftContract, DraftPeer, named


class TargetLane(Lane, Protocol):
    """The lane of a target: it may go on without its draft."""

    def hand_over_without_peer(self, value: int, voided: torch.Tensor) -> None:
        """Beside the lane: zero voided, then the peer's word becomes value."""
        ...


class PlanLink(DraftPeer):
    """The draft as the target sees it: up or down, and the number that the lane has to wait for."""

    poll_s = 0.005

    def __init__(self, rpc: Rpc, contract: DraftContract, lane: TargetLane, num_drafts: torch.Tensor) -> None:
        """contract: with the exchange's map. num_drafts: of all slots, on the device; zeroed when the draft is lost."""
        super().__init__(rpc, contract)
        self._num_drafts = num_drafts
        self._lane = lane
        self._count = 0
        """The newest number of a Plan or value of F."""
        self._is_answered = True
        self.awaited = 0
        """Number of the newest Plan, which the next step has to wait for; 0 if there is none since the last step."""
        self.last: Planned | None = None
        """Reply to the newest Plan, for its times."""

    def _takes(self, ready: DraftReady) -> bool:
        return ready.plans

    def _forget(self) -> None:
        """Nobody writes D any more: the host does, up to the newest number that the lane may wait for."""
        self._is_answered = True
        self.awaited = 0
        self._lane.hand_over_without_peer(self._count, self._num_drafts)

    def _welcome(self, reply: object) -> bool:
        if not super()._welcome(reply):
            return False
        assert self._ready is not None, "welcomed, and not up"
        self._count = max(self._count, self._ready.number)
        self._is_answered = True
        return True

    def next_value(self) -> int:
        """A number that neither word has had."""
        self._count += 1
        return self._count

    def take_awaited(self) -> int:
        """The number the next step has to wait for, 0 if it need not."""
        number, self.awaited = self.awaited, 0
        return number

    def give_up(self) -> None:
        """Kill the draft: it answers, but its turn does not end."""
        if self._ready is not None:
            self._kill()
            self._lost("it hung")

    def send(self, plan: Plan) -> bool:
        """Send a Plan made with next_value, once the one before is answered. False if the draft is lost with that.

        Of the plans before, only the newest may still run.
        """
        if self._ready is None or not self.answered():
            return False
        self.awaited = plan.number
        self._rpc.send(plan)
        self._is_answered = False
        return True

    def answered(self) -> bool:
        """Wait for the answer to the newest Plan, which comes at once; False if the draft is lost.

        The plans before that one must be over: if it is refused, D is written here, and no draft may be at work then.
        """
        if self._is_answered:
            return self._ready is not None
        reply = self._wait()
        if not isinstance(reply, Planned):
            self._lost(f"reply={named(reply)}")
            return False
        self._is_answered = True
        self.last = reply
        return True
