"""Talks to a draft on the device: one Plan a step, answered when it is enqueued, and what happens when it is gone.

The target's stream waits for the draft's word, so a draft that dies or refuses is replaced by the host: it says that
nothing was drafted and writes the word itself (CudaLane.hand_over_without_peer).
"""

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from memsvc.device.lane import Lane
from memsvc.rpc import Rpc
from memsvc.wire.base import WIRE_VERSION, BadRequest
from memsvc.wire.spec import DraftHello, DraftReady, ExchangeMap, Plan, Planned
from target_worker.spec_link import HANG_S, HELLO_INTERVAL_S, DraftContract

logger = logging.getLogger(__name__)

_POLL_S = 0.005


class TargetLane(Lane, Protocol):
    """The lane of a target: it may go on without its draft."""

    def hand_over_without_peer(self, value: int, voided: torch.Tensor) -> None:
        """Beside the lane: zero voided, then the peer's word becomes value."""
        ...


@dataclass(frozen=True, slots=True)
class PlanContract:
    """What both sides must agree on, and where things lie in the exchange."""

    draft: DraftContract
    exchange: ExchangeMap


class PlanLink:
    """The draft as the target sees it: up or down, and the number that the lane has to wait for.

    Nothing here raises when the draft dies. `poll` says once that a draft is (back) up, after which every open request
    has to be told anew.
    """

    def __init__(self, rpc: Rpc, contract: PlanContract, lane: TargetLane, num_drafts: torch.Tensor) -> None:
        """num_drafts: of all slots, on the device; zeroed when the draft is lost."""
        self._rpc = rpc
        self._num_drafts = num_drafts
        self._contract = contract
        self._lane = lane
        self._ready: DraftReady | None = None
        self._pidfd = -1
        self._hello_at = 0.0
        self._hello_sent = False
        self._count = 0
        """The newest number of a Plan or value of F."""
        self._is_answered = True
        self.awaited = 0
        """Number of the newest Plan, which the next step has to wait for; 0 if there is none since the last step."""
        self.last: Planned | None = None
        """Reply to the newest Plan, for its times."""
        self.on_wait: Callable[[], None] | None = None
        """Called again and again while a reply is waited for."""

    @property
    def is_up(self) -> bool:
        """A draft answers."""
        return self._ready is not None

    def next_value(self) -> int:
        """A number that neither word has had."""
        self._count += 1
        return self._count

    def take_awaited(self) -> int:
        """The number the next step has to wait for, 0 if it need not."""
        number, self.awaited = self.awaited, 0
        return number

    def poll(self) -> bool:
        """Look for a draft while there is none. True once, when one has come up."""
        if self._ready is not None:
            self.check()
            if self._ready is not None:
                return False
        now = time.monotonic()
        if now >= self._hello_at:
            self._hello_at = now + HELLO_INTERVAL_S
            self._greet()
        return self._hello_sent and self._welcome(self._receive(0.0))

    def check(self) -> None:
        """Notice that the draft is dead; the lane goes on without it then."""
        if self._ready is not None and not self._is_alive():
            self._lost("it died")

    def give_up(self) -> None:
        """Kill the draft: it answers, but its turn does not end."""
        if self._ready is not None:
            self._kill()
            self._lost("it hung")

    def _greet(self) -> None:
        c = self._contract.draft
        hello = DraftHello(
            WIRE_VERSION, c.engine, c.epoch, c.feature_dim, c.feature_dtype, exchange=self._contract.exchange
        )
        # A draft that loads for very long finds a queue of these; only the newest is waited for.
        with contextlib.suppress(TimeoutError):
            self._rpc.send(hello)
            self._hello_sent = True

    def _receive(self, timeout_s: float) -> object:
        """The reply, None if there is none yet, or the error if what came is no message."""
        try:
            return self._rpc.recv(timeout_s)
        except TimeoutError:
            return None
        except msgspec.DecodeError as error:
            return error

    def _welcome(self, reply: object) -> bool:
        if reply is None:
            return False
        self._hello_sent = False
        if not isinstance(reply, DraftReady) or not reply.plans:
            logger.error("draft refused reply=%s", reply.reason if isinstance(reply, BadRequest) else type(reply))
            return False
        c = self._contract.draft
        if reply.block_size != c.block_size or list(reply.target_layer_ids) != list(c.target_layer_ids):
            logger.error(
                "draft mismatch block_size=%d/%d taps=%s/%s",
                reply.block_size, c.block_size, reply.target_layer_ids, c.target_layer_ids,
            )  # fmt: skip
            return False
        try:
            self._pidfd = os.pidfd_open(reply.pid)
        except ProcessLookupError:
            return False
        self._ready = reply
        self._count = max(self._count, reply.number)
        self._is_answered = True
        logger.info("draft up pid=%d instance=%d number=%d", reply.pid, reply.instance, reply.number)
        return True

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
            self._lost(f"reply={reply.reason if isinstance(reply, BadRequest) else type(reply)}")
            return False
        self._is_answered = True
        self.last = reply
        return True

    def _wait(self) -> object:
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            reply = self._receive(_POLL_S)
            if reply is not None:
                return reply
            if not self._is_alive():
                return None
            if self.on_wait is not None:
                self.on_wait()
        self._kill()
        return None

    def _kill(self) -> None:
        assert self._ready is not None
        logger.error("draft hangs pid=%d: killing it", self._ready.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        select.select([self._pidfd], [], [])

    def _is_alive(self) -> bool:
        return not select.select([self._pidfd], [], [], 0)[0]

    def _lost(self, why: str) -> None:
        """Nobody writes D any more: the host does, up to the newest number that the lane may wait for."""
        logger.warning("draft down, plain decode goes on: %s", why)
        os.close(self._pidfd)
        self._pidfd = -1
        self._ready = None
        self._hello_at = 0.0
        self._is_answered = True
        self.awaited = 0
        self._lane.hand_over_without_peer(self._count, self._num_drafts)
