"""A target's lane in which everything has run when it is enqueued."""

import torch

from memsvc.device.lane import Words
from tests.support.plan_rig import HostLane


class HostTargetLane(HostLane):
    """HostLane that can go on without its draft."""

    def __init__(self, words: Words) -> None:
        super().__init__(words)
        self._peer = words.peer

    def hand_over_without_peer(self, value: int, voided: torch.Tensor) -> None:
        voided.zero_()
        self._peer.fill_(value)
