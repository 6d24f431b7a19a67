"""A small HTTP/1.1 client: one connection a request, body pieces as they arrive.

General clients cost several times the processor time per streamed chunk; on a machine that also runs
the server under test, that time would be taken from the server.
"""

import asyncio
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools


class HttpError(Exception):
    """The connection or the response broke; the text says how."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    tls: bool
    prefix: str
    """Path in front of every route, usually empty."""


def parse_address(url: str) -> Address:
    """The address in an http:// or https:// URL."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"no host in {url!r}")
    tls = parts.scheme == "https"
    return Address(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))


def request_bytes(address: Address, method: str, path: str, body: bytes = b"", api_key: str = "") -> bytes:
    """A whole request as it goes on the wire."""
    lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {address.host}:{address.port}", "Connection: close"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


class Exchange(asyncio.Protocol):
    """One request and its response. Made by open_exchange; close() hangs up at any point."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._body = bytearray()
        self._headers_done = False
        self._framed = False
        self._ended = False
        self._error = ""
        self._wake: asyncio.Future[None] | None = None
        self._lost = asyncio.Event()

    @property
    def status(self) -> int:
        """Status code; valid once head() has returned."""
        return self._parser.get_status_code()

    async def head(self) -> int:
        """Wait for status line and headers; the status. Raises HttpError."""
        while not self._headers_done:
            await self._more()
        return self.status

    async def piece(self) -> bytes:
        """Everything of the body that has arrived since the last call, at least a byte; b"" at its end."""
        while not self._body and not self._ended:
            await self._more()
        piece = bytes(self._body)
        self._body.clear()
        return piece

    async def rest(self) -> bytes:
        """What is left of the body."""
        whole = bytearray()
        while piece := await self.piece():
            whole += piece
        return bytes(whole)

    async def close(self) -> None:
        """Close the connection, whatever state the response is in."""
        if self._transport is not None:
            self._transport.close()
            await self._lost.wait()

    async def _more(self) -> None:
        if self._error:
            raise HttpError(self._error)
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # Calls from the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the methods of asyncio.Transport without being one.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._error = f"not HTTP: {error}"
        self._notify()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended:
            # Without a length and without chunks, the end of the connection is the end of the body.
            if self._headers_done and not self._framed and exc is None:
                self._ended = True
            elif not self._error:
                self._error = f"connection closed before the end of the response{f' ({exc})' if exc else ''}"
        self._lost.set()
        self._notify()

    # Calls from the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._headers_done = True

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self._ended = True


async def open_exchange(address: Address, request: bytes) -> Exchange:
    """Connect and send a request made by request_bytes. Raises HttpError if there is no connection."""
    loop = asyncio.get_running_loop()
    try:
        transport, exchange = await loop.create_connection(
            Exchange, address.host, address.port, ssl=True if address.tls else None
        )
    except OSError as error:
        raise HttpError(f"no connection to {address.host}:{address.port}: {error.strerror or error}") from error
    transport.write(request)
    return exchange


async def get(address: Address, path: str, api_key: str = "") -> tuple[int, bytes]:
    """Status and body of a GET. Raises HttpError."""
    exchange = await open_exchange(address, request_bytes(address, "GET", path, api_key=api_key))
    try:
        status = await exchange.head()
        return status, await exchange.rest()
    finally:
        await exchange.close()
