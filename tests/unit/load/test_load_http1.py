"""The HTTP client below the load generator, byte by byte."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.load.answers import SseLines
from tests.load.http1 import Exchange, HttpError, open_exchange, parse_address, request_bytes


def talk(answer: list[bytes], read: Callable[[Exchange], Awaitable[object]]) -> tuple[object, bytes]:
    """Serve the pieces of answer to one client; what `read` makes of it, and the request the server saw."""
    seen = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.readuntil(b"\r\n\r\n"))
        for piece in answer:
            writer.write(piece)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def go() -> object:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = parse_address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/")
        exchange = await open_exchange(address, request_bytes(address, "GET", "/x", api_key="key"))
        try:
            return await read(exchange)
        finally:
            await exchange.close()
            server.close()
            await server.wait_closed()

    return asyncio.run(go()), bytes(seen)


async def status_and_rest(exchange: Exchange) -> tuple[int, bytes]:
    return await exchange.head(), await exchange.rest()


def test_body_with_a_length():
    found, request = talk([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", b"lo"], status_and_rest)
    assert found == (200, b"hello")
    assert request.startswith(b"GET /base/x HTTP/1.1\r\n")
    assert b"Authorization: Bearer key\r\n" in request


def test_body_in_chunks_cut_anywhere():
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    for cut in range(1, len(whole)):
        assert talk([whole[:cut], whole[cut:]], status_and_rest)[0] == (200, b"abcde")


def test_body_up_to_the_end_of_the_connection():
    assert talk([b"HTTP/1.1 404 No\r\n\r\n", b"gone"], status_and_rest)[0] == (404, b"gone")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed before the end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", "closed before the end"),
        (b"nonsense\r\n\r\n", "not HTTP"),
    ],
)
def test_a_broken_response_is_an_error(answer: bytes, message: str):
    with pytest.raises(HttpError, match=message):
        talk([answer], status_and_rest)


@pytest.mark.parametrize("cut", range(1, 40))
def test_event_lines_cut_anywhere_give_the_same_payloads(cut: int):
    stream = b': hello\ndata: {"a": 1}\r\n\r\ndata: [DONE]\n\n'
    lines = SseLines()
    assert lines.feed(stream[:cut]) + lines.feed(stream[cut:]) == [b'{"a": 1}', b"[DONE]"]
