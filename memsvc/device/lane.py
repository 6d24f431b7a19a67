"""One stream of a worker, and the two words by which target and draft wait for each other on the device.

Nothing here waits for the device on the host but `drain` and `words`, which are for the beginning and the end.
"""

import logging
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from memsvc import cuda_driver
from memsvc.device.slots import SlotState
from memsvc.slot_layout import WORDS_AT

logger = logging.getLogger(__name__)

_D_AT = 32
"""F is the first int32 of the slots' region, D this one: not in one cache line."""
_HANG_S = 30.0
"""A stream that has not run dry this long after it was let go hangs for a reason of its own."""
_LOOK_S = 0.0005


@dataclass(frozen=True, slots=True)
class Words:
    """The hand-over words F and D as one side sees them, int32 [1] each, views of the arena."""

    own: torch.Tensor
    """Written by this side's stream."""
    peer: torch.Tensor
    """Waited for by this side's stream."""

    @classmethod
    def of_target(cls, slots: SlotState) -> "Words":
        """The target writes F and waits for D."""
        return cls(*_word_pair(slots))

    @classmethod
    def of_draft(cls, slots: SlotState) -> "Words":
        """The draft writes D and waits for F."""
        return cls(*reversed(_word_pair(slots)))


def _word_pair(slots: SlotState) -> tuple[torch.Tensor, torch.Tensor]:
    at = WORDS_AT // 4
    return slots.words[at : at + 1], slots.words[at + _D_AT : at + _D_AT + 1]


class Lane(Protocol):
    """Where a worker puts its work. Everything enqueued within `running` runs in order."""

    def running(self) -> AbstractContextManager[object]:
        """Work enqueued inside goes to this lane."""
        ...

    def stage(self, values: np.ndarray) -> torch.Tensor:
        """A copy on the device that later work in the lane may read. values may change right after."""
        ...

    def stage_into(self, out: torch.Tensor, values: np.ndarray) -> None:
        """The same into a static tensor of equal shape and dtype."""
        ...

    def await_peer(self, value: int) -> None:
        """What comes after this in the lane waits until the peer's word is value or more."""
        ...

    def post(self, value: int) -> None:
        """The own word becomes value when everything before has run, and its writes are seen by whoever sees it."""
        ...

    def drain(self, patience_s: float) -> None:
        """Return when the lane is empty. After patience_s the peer is taken for dead and its word is written here."""
        ...

    def words(self) -> tuple[int, int]:
        """Own and peer's word now. Only for an empty lane."""
        ...


class CudaLane:
    """A Lane on a CUDA stream, with stream memory operations for the words."""

    def __init__(self, words: Words) -> None:
        self._words = words
        device = words.own.device
        self._device = device
        self.stream = torch.cuda.Stream(device)
        # Of another priority, so that it never shares a hardware queue with the stream that waits.
        self._release = torch.cuda.Stream(device, priority=-1)
        self._awaited: int | None = None
        self._load_kernels()
        # What was set up before, on whatever stream, is there for everything in this lane.
        torch.cuda.synchronize(device)

    def _load_kernels(self) -> None:
        """Run once what is run beside a stream that waits: a kernel's first launch may wait for the whole device."""
        torch.ones(2, dtype=torch.int32, device=self._device).zero_()
        self.words()

    def running(self) -> AbstractContextManager[object]:
        """See Lane."""
        return torch.cuda.stream(self.stream)

    def stage(self, values: np.ndarray) -> torch.Tensor:
        """See Lane. The pinned copy goes back to torch's pool when the transfer has ended, not before."""
        return torch.from_numpy(values).pin_memory().to(self._device, non_blocking=True)

    def stage_into(self, out: torch.Tensor, values: np.ndarray) -> None:
        """See Lane."""
        out.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)

    def await_peer(self, value: int) -> None:
        """See Lane."""
        self._awaited = value
        cuda_driver.stream_wait(self.stream.cuda_stream, self._words.peer.data_ptr(), value)

    def post(self, value: int) -> None:
        """See Lane."""
        cuda_driver.stream_write(self.stream.cuda_stream, self._words.own.data_ptr(), value)

    def drain(self, patience_s: float) -> None:
        """See Lane. Raises RuntimeError if the stream stands still for another reason than the word."""
        release_at = time.monotonic() + patience_s
        end = release_at + _HANG_S
        while not self.stream.query():
            now = time.monotonic()
            if now >= end:
                raise RuntimeError(f"the stream still works {_HANG_S:.0f} s after it was let go")
            if now >= release_at and self._awaited is not None:
                logger.warning("peer is silent, its word is written here value=%d", self._awaited)
                cuda_driver.stream_write(self._release.cuda_stream, self._words.peer.data_ptr(), self._awaited)
                self._release.synchronize()
                self._awaited = None
            time.sleep(_LOOK_S)
        self._awaited = None

    def words(self) -> tuple[int, int]:
        """See Lane."""
        with torch.cuda.stream(self._release):
            pair = torch.cat((self._words.own, self._words.peer)).cpu().tolist()
        return pair[0], pair[1]

    def hand_over_without_peer(self, value: int, voided: torch.Tensor) -> None:
        """The peer is dead: zero `voided`, then write its word, beside the stream that waits for it.

        For the target, whose stream goes on without drafts: voided is num_drafts of all slots.
        """
        with torch.cuda.stream(self._release):
            voided.zero_()
            cuda_driver.stream_write(self._release.cuda_stream, self._words.peer.data_ptr(), value)
        self._release.synchronize()
