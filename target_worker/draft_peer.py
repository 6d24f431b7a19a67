"""The draft as a process that comes, answers, hangs and dies: what both links to it have in common."""

import contextlib
import logging
import os
import select
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from memsvc.rpc import Rpc
from memsvc.wire.base import WIRE_VERSION, BadRequest, Epoch
from memsvc.wire.spec import DraftHello, DraftReady, ExchangeMap

logger = logging.getLogger(__name__)

HELLO_INTERVAL_S = 0.25
HANG_S = 60.0
"""A draft that answers nothing for this long is killed: it might wake up and write into pages of others."""


@dataclass(frozen=True, slots=True)
class DraftContract:
    """What both sides must agree on."""

    engine: str
    epoch: Epoch
    feature_dim: int
    feature_dtype: str
    block_size: int
    target_layer_ids: Sequence[int]
    exchange: ExchangeMap | None = None
    """CUDA: where things lie in the exchange."""


class DraftPeer(ABC):
    """Up or down. Nothing here raises when the draft dies.

    `poll` says once that a draft is (back) up, after which every open request has to be reset and told anew.
    """

    poll_s = 0.05
    """How often a draft that is waited for is looked at."""

    def __init__(self, rpc: Rpc, contract: DraftContract) -> None:
        self._rpc = rpc
        self._contract = contract
        self._hello_at = 0.0
        self._hello_sent = False
        self._ready: DraftReady | None = None
        self._pidfd = -1
        self.on_wait: Callable[[], None] | None = None
        """Called again and again while a reply is waited for."""

    @abstractmethod
    def _takes(self, ready: DraftReady) -> bool:
        """This kind of draft can be worked with."""

    @abstractmethod
    def _forget(self) -> None:
        """The draft is lost, and so is what was told it."""

    @property
    def is_up(self) -> bool:
        """A draft answers."""
        return self._ready is not None

    def poll(self) -> bool:
        """Look for a draft while there is none. True once, when one has come up."""
        self.check()
        if self._ready is not None:
            return False
        # Before the next one is sent: whoever looks no more often than that would never see a reply to the newest.
        if self._hello_sent and self._welcome(self._receive(0.0)):
            return True
        now = time.monotonic()
        if now >= self._hello_at:
            self._hello_at = now + HELLO_INTERVAL_S
            self._greet()
        return self._hello_sent and self._welcome(self._receive(0.0))

    def check(self) -> None:
        """Notice that the draft is dead."""
        if self._ready is not None and not self._is_alive():
            self._lost("it died")

    def _greet(self) -> None:
        c = self._contract
        hello = DraftHello(WIRE_VERSION, c.engine, c.epoch, c.feature_dim, c.feature_dtype, c.exchange)
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
        if not isinstance(reply, DraftReady) or not self._takes(reply):
            logger.error("draft refused reply=%s", named(reply))
            return False
        c = self._contract
        if reply.block_size != c.block_size or list(reply.target_layer_ids) != list(c.target_layer_ids):
            logger.error(
                "draft mismatch block_size=%d/%d taps=%s/%s",
                reply.block_size,
                c.block_size,
                reply.target_layer_ids,
                c.target_layer_ids,
            )
            return False
        try:
            self._pidfd = os.pidfd_open(reply.pid)
        except ProcessLookupError:
            return False
        self._ready = reply
        logger.info("draft up pid=%d instance=%d", reply.pid, reply.instance)
        return True

    def _wait(self) -> object:
        """The reply that is due; None if the draft died, or was killed because it said nothing."""
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            reply = self._receive(self.poll_s)
            if reply is not None:
                return reply
            if not self._is_alive():
                return None
            if self.on_wait is not None:
                self.on_wait()
        self._kill()
        return None

    def _kill(self) -> None:
        assert self._ready is not None, "no draft to kill"
        logger.error("draft hangs pid=%d seconds=%d: killing it", self._ready.pid, HANG_S)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        select.select([self._pidfd], [], [])

    def _is_alive(self) -> bool:
        return not select.select([self._pidfd], [], [], 0)[0]

    def _lost(self, why: str) -> None:
        logger.warning("draft down, plain decode goes on: %s", why)
        os.close(self._pidfd)
        self._pidfd = -1
        self._ready = None
        self._hello_at = 0.0
        self._forget()


def named(reply: object) -> str:
    """What came instead of the reply that was expected, for the log, which shall hold no tokens."""
    match reply:
        case BadRequest(reason):
            return f"BadRequest: {reason}"
        case msgspec.DecodeError():
            return f"no message: {reply}"
        case _:
            return type(reply).__name__
