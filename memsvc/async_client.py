"""The memory service for engines built on asyncio: memsvc.client with `await`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq.asyncio

from memsvc.errors import FencedError, MemoryServiceError, ServiceDown
from memsvc.registration import Registration, StepParts, expect
from memsvc.rpc import AsyncRpc
from memsvc.wire.base import Done, Epoch, Msg
from memsvc.wire.links import MEM
from memsvc.wire.mem import AckEpoch, Leave, Registered, Renew, Stepped


class AsyncMemoryClient:
    """One worker's connection. Use it in an `async with`: leaving the block leaves the service.

    Raises what MemoryClient raises. Tasks may share it, but only one may have a step under way: the
    next Step's number depends on how the last one ended.
    """

    def __init__(self, run_dir: Path, *, timeout_s: float = 1.0, max_sends: int = 15) -> None:
        self._context = zmq.asyncio.Context()
        self._rpc = AsyncRpc(self._context, MEM, run_dir)
        self._timeout_s = timeout_s
        self._max_sends = max_sends
        self._registration = Registration()
        self._is_stepping = False

    @property
    def registered(self) -> Registered | None:
        """The answer to `register`: epoch, layout, lease. None before it and after `leave`."""
        return self._registration.registered

    async def register(self, engine: str, role: str, kinds: Sequence[str], model_fingerprint: str) -> Registered:
        """Join as (engine, role); an earlier registration of the same pair is fenced."""
        return self._registration.began(
            await self._call(self._registration.make_register(engine, role, kinds, model_fingerprint))
        )

    async def step(self, parts: StepParts) -> Stepped:
        """Carry out one Step. Raises ValueError while another task's step is under way."""
        if self._is_stepping:
            raise ValueError(f"Step {self._registration.last_num + 1} is under way")
        step = self._registration.make_step(parts)
        self._is_stepping = True
        try:
            reply = await self._call(step)
        except ValueError:
            # Too long to be sent at all, so the number is still free.
            raise
        except BaseException:
            # It may have been carried out, also if this task was cancelled: the number is lost.
            self._registration.left()
            raise
        finally:
            self._is_stepping = False
        return self._registration.stepped(reply)

    async def renew(self) -> None:
        """Keep the lease while idle; any other request does the same."""
        self._registration.expect(await self._call(Renew(self._registration.epoch)), Done)

    async def ack_epoch(self, fenced_before: Epoch) -> None:
        """A co-writer says that it touches no page of its engine's epochs before fenced_before."""
        self._registration.expect(await self._call(AckEpoch(self._registration.epoch, fenced_before)), Done)

    async def leave(self) -> None:
        """End the registration: all requests close at once. Fine on an epoch that is over already."""
        reply = await self._call(Leave(self._registration.epoch))
        self._registration.left()
        try:
            expect(reply, Done)
        except FencedError:
            # A resent Leave finds the epoch ended by the first one.
            return

    async def _call(self, msg: Msg) -> Any:
        for _ in range(self._max_sends):
            try:
                return await self._rpc.call(msg, self._timeout_s)
            except TimeoutError:
                continue
            except msgspec.DecodeError as error:
                raise MemoryServiceError(f"undecodable reply to {type(msg).__name__}: {error}") from error
        raise ServiceDown(
            f"no reply to {type(msg).__name__}, sent {self._max_sends} times with {self._timeout_s:g} s each"
        )

    def close(self) -> None:
        """Close the connection. Nothing can be called after it."""
        self._rpc.close()
        self._context.term()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        # One try: if the service is gone, more would only delay this process's end.
        self._max_sends = 1
        try:
            if self.registered is not None:
                await self.leave()
        except ServiceDown:
            # Its pidfd or lease tells the service anyway.
            pass
        finally:
            self.close()
