"""The front's sockets: to the tokenizer, from tokenizer, target and supervisor, and to the service's admin side."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import zmq
import zmq.asyncio

from memsvc.inbox import PullInbox
from memsvc.outline import trace
from memsvc.rpc import AsyncRpc
from memsvc.transport import bind, connect
from memsvc.wire.admin import Check, Flush, GetStats
from memsvc.wire.codec import encode
from memsvc.wire.links import FRONT_TOK, MEM_ADMIN, Link
from memsvc.wire.text import FrontToTok

logger = logging.getLogger(__name__)

ADMIN_TIMEOUT_S = 1.0


class TokLink:
    """Sends to the tokenizer. What it can't take yet waits inside the socket, in order."""

    def __init__(self, context: zmq.asyncio.Context, run_dir: Path) -> None:
        self._context = context
        self._run_dir = run_dir
        self._socket = connect(context, FRONT_TOK, run_dir)

    def send(self, msg: FrontToTok) -> None:
        """Queue a message; never blocks. The journal bounds how many can wait."""
        # The future is not awaited: pyzmq sends in order, and closing the socket cancels what waits.
        self._socket.send(encode(msg))

    def reopen(self) -> None:
        """Drop what waits for a tokenizer that is gone; what is sent from now on is for the next one."""
        self._socket.close()
        self._socket = connect(self._context, FRONT_TOK, self._run_dir)

    def close(self) -> None:
        """Nothing can be sent after this."""
        self._socket.close()


class Links:
    """Every socket of the front. Use it in an `async with`."""

    def __init__(self, run_dir: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._run_dir = run_dir
        self._admin = AsyncRpc(self._context, MEM_ADMIN, run_dir)
        self._inboxes: dict[str, tuple[zmq.asyncio.Socket, PullInbox]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.tokenizer = TokLink(self._context, run_dir)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket, _inbox in self._inboxes.values():
            socket.close()
        self._admin.close()
        self.tokenizer.close()
        self._context.term()

    async def ask_memory(self, msg: GetStats | Flush | Check, timeout_s: float = ADMIN_TIMEOUT_S) -> Any:
        """The memory service's reply. Raises TimeoutError when it does not answer."""
        return await self._admin.call(msg, timeout_s)

    def receive(self, link: Link, handler: Callable[[Any], None]) -> None:
        """Bind link and hand its messages to handler from now on."""
        socket = bind(self._context, link, self._run_dir)
        inbox = PullInbox(cast("zmq.Socket[bytes]", socket), link)
        self._inboxes[link.name] = (socket, inbox)
        self._tasks.append(asyncio.create_task(_pump(link.name, socket, inbox, handler)))

    @property
    def num_bad_frames(self) -> dict[str, int]:
        """Frames that were no message, by link."""
        return {name: inbox.bad_frames.num for name, (_socket, inbox) in self._inboxes.items()}


async def _pump(name: str, socket: zmq.asyncio.Socket, inbox: PullInbox, handler: Callable[[Any], None]) -> None:
    while True:
        msg = inbox.decode(await socket.recv_multipart())
        if msg is None:
            continue
        try:
            handler(msg)
        except Exception as error:
            # Our own bug, and the other requests have no part in it.
            logger.error("handler failed link=%s message=%s error=%s", name, type(msg).__name__, trace(error))
