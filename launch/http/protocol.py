"""uvicorn's HTTP/1.1 with limits that it lacks: size and time of the head, number of connections."""

import asyncio
from asyncio.events import TimerHandle
from typing import ClassVar

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from launch.http.config import FrontConfig
from launch.http.errors import ApiError

HEAD_TIMEOUT_S = 30.0
"""A connection on which a request head, the first or a later one, is not complete after so long is closed."""

PIECE_BYTES = 4096
"""What is parsed at once, and by how much a head may pass the limit here; edge.py measures it to the byte."""


def limited_protocol(config: FrontConfig) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn's `http` setting that enforces the limits of the config."""
    return type("LimitedProtocol", (_LimitedProtocol,), {"limits": config})


class _LimitedProtocol(HttpToolsProtocol):
    limits: ClassVar[FrontConfig]
    num_head_bytes = 0
    head_timer: TimerHandle | None = None
    reads_body = False
    running: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the newest one read, which may wait behind it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        limit = self.limits.max_connections
        if len(self.connections) > limit:
            self.refuse(ApiError(503, f"more than {limit} connections are open"))
            return
        self.start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        self.hang_up()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        # The transport closes itself now, and a write to it would raise.
        self.hang_up()
        super().eof_received()

    def data_received(self, data: bytes) -> None:
        # In pieces: a head that arrives as a whole is complete, and counted no more, when the parser returns.
        for start in range(0, len(data), PIECE_BYTES):
            if self.transport.is_closing():
                return
            self.piece_received(data[start : start + PIECE_BYTES])

    def piece_received(self, data: bytes) -> None:
        """Parse a piece; a head that goes on behind it and is too long already is refused."""
        # Heads and bodies reset the count, so what is left of it is a head that is not complete.
        self.num_head_bytes += len(data)
        # Also for blank lines, which begin no message but stop uvicorn's keep-alive timer.
        if not self.reads_body:
            self.start_timer()
        super().data_received(data)
        limit = self.limits.max_head_bytes
        if self.num_head_bytes > limit and not self.transport.is_closing():
            self.refuse(ApiError(431, f"the request head is longer than {limit} bytes"))

    def on_message_begin(self) -> None:
        self.start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.num_head_bytes = 0
        self.reads_body = True
        self.stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.reads_body = False
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.running = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        self.refuse(ApiError(400, msg))

    def refuse(self, error: ApiError) -> None:
        """Answer outside of any request and close; in the middle of an answer just close."""
        if not self.is_answering:
            body = error.body()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    @property
    def is_answering(self) -> bool:
        """Whether any request that was read is not answered in full."""
        return self.cycle is not None and not self.cycle.response_complete

    def hang_up(self) -> None:
        """Tell the running request that its client is gone; uvicorn tells only the newest."""
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True
            self.running.message_event.set()

    def start_timer(self) -> None:
        """A head begins, unless one did already."""
        if self.head_timer is None and not self.transport.is_closing():
            self.head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.on_slow_head)

    def on_slow_head(self) -> None:
        """Close the connection; an answer that is under way is let come to its end first."""
        self.head_timer = None
        if self.is_answering:
            self.start_timer()
        else:
            self.transport.close()

    def stop_timer(self) -> None:
        """The head has come, or never will."""
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
