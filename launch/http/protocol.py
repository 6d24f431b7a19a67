"""uvicorn's HTTP/1.1 with limits that it lacks: size and time of the head, number of connections."""

import asyncio
from asyncio.events import TimerHandle
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from launch.http.config import FrontConfig
from launch.http.errors import ApiError

HEAD_TIMEOUT_S = 30.0
"""A new connection on which no complete request head came for so long is closed."""


def limited_protocol(config: FrontConfig) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn's `http` setting that enforces the limits of the config."""
    return type("LimitedProtocol", (_LimitedProtocol,), {"limits": config})


class _LimitedProtocol(HttpToolsProtocol):
    limits: ClassVar[FrontConfig]
    num_head_bytes = 0
    head_timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        limit = self.limits.max_connections
        if len(self.connections) > limit:
            self.refuse(ApiError(503, f"more than {limit} connections are open"))
            return
        self.head_timer = self.loop.call_later(HEAD_TIMEOUT_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Heads and bodies reset the count, so what is left of it is a head that is not complete.
        self.num_head_bytes += len(data)
        super().data_received(data)
        limit = self.limits.max_head_bytes
        if self.num_head_bytes > limit and not self.transport.is_closing():
            self.refuse(ApiError(431, f"the request head is longer than {limit} bytes"))

    def on_headers_complete(self) -> None:
        self.num_head_bytes = 0
        self.stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.num_head_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self.refuse(ApiError(400, msg))

    def refuse(self, error: ApiError) -> None:
        """Answer outside of any request and close; in the middle of an answer just close."""
        if self.cycle is None or self.cycle.response_complete:
            body = error.body()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def stop_timer(self) -> None:
        """The head has come, or never will."""
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
