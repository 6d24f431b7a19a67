"""A server in the test's own event loop that answers like an OpenAI-compatible one, with faults on demand."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class FakeOpenAI:
    """What the fake says and what it has seen. `text_of` maps a request body to the pieces of its answer."""

    text_of: Callable[[dict[str, Any]], list[str]] = lambda body: ["one ", "two ", "three"]
    status: int = 200
    """Status of the load routes."""
    with_usage: bool = True
    with_metrics: bool = True
    """Acceptance in the usage chunk: 4 steps, 6 accepted drafts a request."""
    drop_after: int | None = None
    """Close the connection after this many chunks of a stream."""
    error_after: int | None = None
    """Put an error into the stream after this many chunks."""
    hang: bool = False
    """Never answer a load request, only wait for the client to go."""
    check: dict[str, Any] | None = None
    """Body of GET /check; None answers 404."""
    spec_counters: tuple[int, int] | None = None
    """Steps and accepted drafts in /metrics; both grow by one and two with each load request."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    num_running: int = 0
    num_hang_ups: int = 0

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Listen on a free loopback port; yields the base URL."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            server.close()
            await server.wait_closed()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])}
            self.keys.add(headers.get("authorization", ""))
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            if method == "POST":
                await self._load(reader, writer, json.loads(body))
            else:
                _answer(writer, *self._get(path))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_hang_ups += 1
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _get(self, path: str) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "fake", "object": "model"}]}).encode()
        if path == "/server_info":
            return 200, b'{"served_model_name": "fake"}'
        if path == "/check" and self.check is not None:
            return 200, json.dumps(self.check | {"idle": self.num_running == 0}).encode()
        if path == "/metrics" and self.spec_counters is not None:
            steps, accepted = (n + (i + 1) * len(self.bodies) for i, n in enumerate(self.spec_counters))
            return 200, (
                f'vllm:spec_decode_num_drafts_total{{model_name="fake"}} {steps}.0\n'
                f'vllm:spec_decode_num_accepted_tokens_total{{model_name="fake"}} {accepted}.0\n'
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 99.0\n'
            ).encode()
        return 404, b'{"error": {"message": "no such route"}}'

    async def _load(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        self.num_running += 1
        try:
            if self.hang:
                assert await reader.read() == b""
                self.num_hang_ups += 1
            elif self.status != 200:
                _answer(writer, self.status, b'{"error": {"message": "not today", "type": "overloaded"}}')
            elif body["stream"]:
                await self._stream(writer, body)
            else:
                _answer(writer, 200, json.dumps(self._whole(body)).encode())
        finally:
            self.num_running -= 1

    def _extras(self, num_tokens: int) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.with_usage:
            extras["usage"] = {
                "prompt_tokens": 10,
                "completion_tokens": num_tokens,
                "prompt_tokens_details": {"cached_tokens": 4},
            }
        if self.with_metrics:
            extras["metrics"] = {"speculative_decoding": {"num_spec_steps": 4, "num_accepted_draft_tokens": 6}}
        return extras

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        pieces = self.text_of(body)
        return {"choices": [_choice(body, "".join(pieces), "message", "stop")], **self._extras(2 * len(pieces))}

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        pieces = self.text_of(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i, piece in enumerate(pieces):
            if i == self.drop_after:
                return
            if i == self.error_after:
                _chunk(writer, {"error": {"message": "gone", "type": "internal"}})
                break
            _chunk(writer, {"choices": [_choice(body, piece, "delta", None)]})
            await writer.drain()
        _chunk(writer, {"choices": [_choice(body, "", "delta", "stop")]})
        if self.with_usage or self.with_metrics:
            _chunk(writer, {"choices": [], **self._extras(2 * len(pieces))})
        _raw_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _choice(body: dict[str, Any], text: str, part: str, finish_reason: str | None) -> dict[str, Any]:
    content = {part: {"content": text}} if "messages" in body else {"text": text}
    return {"index": 0, "finish_reason": finish_reason, **content}


def _answer(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def _raw_chunk(writer: asyncio.StreamWriter, payload: bytes) -> None:
    writer.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")


def _chunk(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _raw_chunk(writer, f"data: {json.dumps(event)}\n\n".encode())
