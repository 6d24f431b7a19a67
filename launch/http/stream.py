"""Sends the answer of a call: one JSON body, or server-sent events. A client that hangs up ends the call."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping

import msgspec
from starlette.types import Receive, Scope, Send

from launch.http.answer import AnswerWriter
from launch.http.calls import Call
from launch.http.engine import Engine
from launch.http.errors import ApiError

logger = logging.getLogger(__name__)

_json = msgspec.json.Encoder()
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Tells nginx not to hold events back.
    (b"x-accel-buffering", b"no"),
]


class CallAnswer:
    """An ASGI response. Errors before the first output are raised as ApiError, later ones end the stream."""

    def __init__(self, engine: Engine, call: Call, writer: AnswerWriter) -> None:
        self._engine = engine
        self._call = call
        self._writer = writer

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            if self._call.generation.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
            # Nothing is left of a call that was answered in full.
            self._engine.abort(self._call)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._call.is_done:
            logger.info("client hung up status=499 choices=%d", len(self._call.choices))
        self._call.hang_up()

    async def _whole(self, send: Send) -> None:
        call = self._call
        while not (call.is_done or call.is_gone or call.error):
            await call.news()
        if call.error:
            raise call.error
        if call.is_gone:
            return
        body = _json.encode(self._writer.whole())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        call = self._call
        # The status is held back until there is output: a request that can't be served still gets a
        # plain 400, and the first event is the first token, which is what clients time.
        while not (call.has_news or call.is_gone or call.error):
            await call.news()
        if call.error:
            raise call.error
        if call.is_gone:
            return
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        while not call.is_gone:
            events = b"".join(_event(_json.encode(chunk)) for chunk in self._writer.chunks())
            if call.error or call.is_done:
                await _send_part(send, events + self._last_events(), more=False)
                return
            if events:
                await _send_part(send, events, more=True)
            await call.news()

    def _last_events(self) -> bytes:
        if self._call.error:
            return _event(self._call.error.body())
        usage = b""
        if self._call.generation.include_usage:
            usage = _event(_json.encode(self._writer.usage_chunk()))
        return usage + _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _send_part(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """The request's body. Raises ApiError 413 past limit, after reading at most as much again."""
    length = headers.get("content-length", "0")
    declared = int(length) if length.isascii() and length.isdigit() else 0
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client hung up before its request was complete")
        num_bytes += len(message.get("body", b""))
        has_more = message.get("more_body", False)
        if max(num_bytes, declared) <= limit:
            parts.append(message.get("body", b""))
        elif num_bytes > 2 * limit or not has_more:
            # Most clients read an answer only after they have sent everything.
            raise ApiError(413, f"the request body has {max(num_bytes, declared)} bytes, limit {limit}")
        if not has_more:
            return b"".join(parts)
