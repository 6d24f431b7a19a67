"""The memory service for engines: one method per request, numbering and epoch inside.

A worker registers, then exchanges one Step per scheduler step. `begin_step` and `finish_step` are
the two halves of `step`: the round trip can run while a forward does. A lost reply costs nothing:
the request is sent again with its number, and the service repeats the reply instead of the work.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from memsvc.errors import FencedError, MemoryServiceError, ServiceDown
from memsvc.registration import Registration, StepParts, expect
from memsvc.rpc import Rpc
from memsvc.wire.admin import (
    Check,
    CheckReport,
    Evict,
    Evicted,
    Flush,
    GetStats,
    Match,
    Matched,
    Pin,
    Pinned,
    Snapshot,
    SnapshotReport,
    Stats,
    Unpin,
)
from memsvc.wire.base import Done, Epoch, Msg
from memsvc.wire.links import MEM, MEM_ADMIN, Link
from memsvc.wire.mem import AckEpoch, Leave, Registered, Renew, Step, Stepped


class _Caller:
    """Sends one request at a time on one link of the service, again when no reply comes."""

    def __init__(self, link: Link, run_dir: Path, timeout_s: float, max_sends: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._rpc = Rpc(self._context, link, run_dir)
        except BaseException:
            self._context.term()
            raise
        self._timeout_s = timeout_s
        self._max_sends = max_sends

    def _call(self, msg: Msg) -> Any:
        self._rpc.send(msg)
        return self._finish(msg)

    def _finish(self, msg: Msg) -> Any:
        for num_sent in range(1, self._max_sends + 1):
            try:
                return self._rpc.recv(self._timeout_s)
            except TimeoutError:
                if num_sent < self._max_sends:
                    self._rpc.send(msg)
            except msgspec.DecodeError as error:
                raise MemoryServiceError(f"undecodable reply to {type(msg).__name__}: {error}") from error
        raise ServiceDown(
            f"no reply to {type(msg).__name__}, sent {self._max_sends} times with {self._timeout_s:g} s each"
        )

    def close(self) -> None:
        """Close the connection. Nothing can be called after it."""
        self._rpc.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


class MemoryClient(_Caller):
    """One worker's connection. Use it in a `with`: leaving the block leaves the service.

    Every method raises MemoryServiceError with the service's reason when it is refused, FencedError
    when the epoch is over, ServiceDown when no reply comes. Not for use by two threads at once.
    """

    def __init__(self, run_dir: Path, *, timeout_s: float = 1.0, max_sends: int = 15) -> None:
        super().__init__(MEM, run_dir, timeout_s, max_sends)
        self._registration = Registration()
        self._step: Step | None = None

    @property
    def registered(self) -> Registered | None:
        """The answer to `register`: epoch, layout, lease. None before it and after `leave`."""
        return self._registration.registered

    def register(self, engine: str, role: str, kinds: Sequence[str], model_fingerprint: str) -> Registered:
        """Join as (engine, role); an earlier registration of the same pair is fenced.

        role is "target" (owns requests) or "draft" (co-writes them). kinds are names of page kinds.
        """
        self._step = None
        return self._registration.began(
            self._call(self._registration.make_register(engine, role, kinds, model_fingerprint))
        )

    def step(self, parts: StepParts) -> Stepped:
        """Carry out one Step and wait for what it changed."""
        self.begin_step(parts)
        return self.finish_step()

    def begin_step(self, parts: StepParts) -> None:
        """Send a Step. No other request until finish_step. Raises ValueError if one has begun already."""
        self._check_idle()
        step = self._registration.make_step(parts)
        self._rpc.send(step)
        self._step = step

    def finish_step(self) -> Stepped:
        """Wait for the reply to the Step begun. Raises ValueError if none has."""
        if self._step is None:
            raise ValueError("finish_step without begin_step")
        step, self._step = self._step, None
        try:
            reply = self._finish(step)
        except ServiceDown:
            # The Step may have been carried out, so its number is neither used nor free.
            self._registration.left()
            raise
        return self._registration.stepped(reply)

    def renew(self) -> None:
        """Keep the lease while idle; any other request does the same."""
        self._check_idle()
        self._registration.expect(self._call(Renew(self._registration.epoch)), Done)

    def ack_epoch(self, fenced_before: Epoch) -> None:
        """A co-writer says that it touches no page of its engine's epochs before fenced_before."""
        self._check_idle()
        self._registration.expect(self._call(AckEpoch(self._registration.epoch, fenced_before)), Done)

    def leave(self) -> None:
        """End the registration: all requests close at once. Fine on an epoch that is over already."""
        self._step = None
        reply = self._call(Leave(self._registration.epoch))
        self._registration.left()
        try:
            expect(reply, Done)
        except FencedError:
            # A resent Leave finds the epoch ended by the first one.
            return

    def _check_idle(self) -> None:
        if self._step is not None:
            raise ValueError(f"Step {self._step.num} has begun and is not finished")

    def __exit__(self, *exc_info: object) -> None:
        # One try: if the service is gone, more would only delay this process's end.
        self._max_sends = 1
        try:
            if self.registered is not None:
                self.leave()
        except ServiceDown:
            # Its pidfd or lease tells the service anyway.
            pass
        finally:
            super().__exit__(*exc_info)


class AdminClient(_Caller):
    """Looks into a running service and steers its cache. Same exceptions as MemoryClient."""

    def __init__(self, run_dir: Path, *, timeout_s: float = 30.0) -> None:
        # Sent once: a repeated Evict would evict twice.
        super().__init__(MEM_ADMIN, run_dir, timeout_s, max_sends=1)

    def match(self, tokens: bytes, salt: str = "") -> Matched:
        """How much of these packed tokens is cached. Changes nothing."""
        return expect(self._call(Match(tokens, salt)), Matched)

    def pin(self, name: str, tokens: bytes, ttl_s: float, salt: str = "") -> Pinned:
        """Keep the cached prefix of tokens for ttl_s seconds. Refused past the pin budget."""
        return expect(self._call(Pin(name, tokens, ttl_s, salt)), Pinned)

    def unpin(self, name: str) -> None:
        """Let go of a pin."""
        expect(self._call(Unpin(name)), Done)

    def flush(self) -> None:
        """Evict everything that no request and no pin holds."""
        expect(self._call(Flush()), Done)

    def evict(self, kind: str, num_pages: int) -> Evicted:
        """Evict at least num_pages pages of a kind, if that many are evictable."""
        return expect(self._call(Evict(kind, num_pages)), Evicted)

    def get_stats(self) -> Stats:
        """Counters since start, and the arena by kind and state."""
        return expect(self._call(GetStats()), Stats)

    def check(self) -> CheckReport:
        """Have the service compare everything with its counters; it serves nobody else for 3 s a million pages."""
        return expect(self._call(Check()), CheckReport)

    def snapshot(self) -> SnapshotReport:
        """Who holds what."""
        return expect(self._call(Snapshot()), SnapshotReport)
