"""The HTTP protocol's own limits on a fake connection: slow heads, and clients that leave while they pipeline."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from launch.http.config import FrontConfig
from launch.http.edge import Edge
from launch.http.protocol import limited_protocol

CONFIG = FrontConfig(run_dir="", model_path="/m", served_model_names=("m",), context_len=64)
REQUEST = b"GET /a HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n\r\n"


class FakeTransport(asyncio.Transport):
    """Like uvloop's: a write after the close raises."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        if self.is_closed:
            raise RuntimeError("the handler is closed")
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class App:
    """Answers once it may, or notes that the client hung up."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_hung_up = 0

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await self.may_answer.wait()
        if (await receive())["type"] == "http.disconnect":
            self.num_hung_up += 1
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


class Connection:
    """One connection with a fake transport."""

    def __init__(self) -> None:
        self.app = App()
        edge = Edge(self.app, api_key="", config=CONFIG)
        config = uvicorn.Config(edge, log_config=None, ws="none", lifespan="off")
        # The class has more than its base says.
        self.protocol: Any = limited_protocol(CONFIG)(config, ServerState(), {})
        self.transport = FakeTransport()
        self.protocol.connection_made(self.transport)

    def feed(self, data: bytes) -> bool:
        """Whether the head's time runs afterwards."""
        self.protocol.data_received(data)
        return self.protocol.head_timer is not None

    async def end(self) -> None:
        """Let the requests end."""
        self.app.may_answer.set()
        await asyncio.gather(*self.protocol.tasks)


def with_connection(body: Callable[[Connection], Awaitable[None]]) -> None:
    async def main() -> None:
        connection = Connection()
        await body(connection)
        connection.protocol.stop_timer()
        connection.protocol._unset_keepalive_if_required()

    asyncio.run(main())


def test_the_time_of_every_head_of_a_connection_is_limited() -> None:
    async def body(connection: Connection) -> None:
        assert connection.protocol.head_timer is not None
        assert not connection.feed(REQUEST)
        await connection.end()
        assert connection.feed(b"GET /b HT")
        assert not connection.feed(b"TP/1.1\r\n\r\n")
        await connection.end()
        # Blank lines are no head yet, but must not keep a connection open either.
        assert connection.feed(b"\r\n")
        connection.protocol.on_slow_head()
        assert connection.transport.is_closed

    with_connection(body)


def test_a_body_is_not_taken_for_a_slow_head_and_the_head_behind_it_is() -> None:
    async def body(connection: Connection) -> None:
        assert not connection.feed(POST)
        assert not connection.feed(b"ab")
        assert connection.feed(b"cdGET /b")
        await connection.end()

    with_connection(body)


def test_a_slow_head_behind_a_running_answer_does_not_cut_it() -> None:
    async def body(connection: Connection) -> None:
        assert connection.feed(REQUEST + b"GET /b")
        connection.protocol.on_slow_head()
        assert not connection.transport.is_closed
        assert connection.protocol.head_timer is not None
        await connection.end()
        connection.protocol.on_slow_head()
        assert connection.transport.is_closed

    with_connection(body)


def test_a_client_that_half_closes_while_pipelining_has_hung_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def body(connection: Connection) -> None:
        connection.feed(REQUEST + REQUEST)
        connection.protocol.eof_received()
        connection.transport.close()
        await connection.end()
        assert connection.app.num_hung_up == 1

    with_connection(body)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "status=499" in caplog.text


def test_a_connection_that_breaks_while_pipelining_ends_the_running_request() -> None:
    async def body(connection: Connection) -> None:
        connection.feed(REQUEST + REQUEST)
        connection.transport.close()
        connection.protocol.connection_lost(ConnectionResetError())
        await connection.end()
        assert connection.app.num_hung_up == 1

    with_connection(body)


@pytest.mark.parametrize("line", [b"a:\r\n", b"a:" + b" " * 60 + b"\r\n", b"x: 1\r\n"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_head_past_the_limit_is_refused_however_small_its_headers_are(line: bytes, at_once: bool) -> None:
    async def body(connection: Connection) -> None:
        head = REQUEST.removesuffix(b"\r\n") + line * (120_000 // len(line)) + b"\r\n"
        for piece in [head] if at_once else [head[:70_000], head[70_000:]]:
            if not connection.transport.is_closed:
                connection.feed(piece)
        assert connection.transport.is_closed
        assert connection.transport.written.startswith(b"HTTP/1.1 431")
        assert connection.protocol.cycle is None
        assert b"the request head is longer than 65536 bytes" in connection.transport.written

    with_connection(body)


def test_a_long_head_behind_a_body_in_one_piece_is_refused_too() -> None:
    async def body(connection: Connection) -> None:
        connection.feed(POST + b"abcd" + REQUEST.removesuffix(b"\r\n") + b"a:\r\n" * 30_000 + b"\r\n")
        assert connection.transport.is_closed
        await connection.end()
        assert connection.app.num_hung_up == 0

    with_connection(body)


def test_a_head_between_the_limit_and_one_piece_more_is_refused_with_its_size() -> None:
    async def body(connection: Connection) -> None:
        lines = b"a:\r\n" * ((CONFIG.max_head_bytes + 100) // 4)
        connection.feed(REQUEST.removesuffix(b"\r\n") + lines + b"\r\n")
        await connection.end()
        assert connection.transport.written.startswith(b"HTTP/1.1 431")
        assert connection.app.num_hung_up == 0

    with_connection(body)


def test_a_long_body_is_no_long_head() -> None:
    async def body(connection: Connection) -> None:
        connection.feed(b"POST /a HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500000\r\n\r\n" + b"x" * 500_000)
        await connection.end()
        assert connection.transport.written.startswith(b"HTTP/1.1 200")

    with_connection(body)
