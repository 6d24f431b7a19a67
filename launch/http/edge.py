"""What every request passes: an id, the key, and an error body whatever goes wrong."""

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launch.http.config import FrontConfig
from launch.http.errors import ApiError
from launch.http.sites import HostCheck, check_origin
from memsvc.outline import trace

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_POLLED_PATHS = ("/health", "/metrics")
_POLLED_STATUSES = (200, 503)
"""As long as a server is not healthy, its log has the reason, not each time that it was asked for."""
_OPEN_PATHS = ("/health",)
_REQUEST_LINE_BYTES = len("  HTTP/1.1\r\n")
_HEADER_LINE_BYTES = len(": \r\n")


class Edge:
    """ASGI middleware. api_key empty: every client is let in, see sites.py for whom it is not."""

    def __init__(self, app: ASGIApp, api_key: str, config: FrontConfig) -> None:
        self._app = app
        self._max_head_bytes = config.max_head_bytes
        self._hosts = HostCheck(config.host, requires_key=bool(api_key))
        self._expected = f"Bearer {api_key}".encode() if api_key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        try:
            self._check_head(scope)
            self._check_key(scope)
            self._hosts.check(scope)
            check_origin(scope)
            await self._app(scope, receive, exchange.send)
        except ApiError as error:
            await exchange.fail(error)
        except Exception as error:
            # A bug in one request must not take the others down.
            logger.error("request crashed id=%s path=%s error=%s", exchange.request_id, _shown(scope), trace(error))
            await exchange.fail(ApiError(500, "internal error, see the server's log"))
        finally:
            exchange.log()

    def _check_head(self, scope: Scope) -> None:
        # The protocol cuts long heads off to within a piece of what it reads; here one is measured.
        size = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"]) + _REQUEST_LINE_BYTES
        size += sum(len(name) + len(value) + _HEADER_LINE_BYTES for name, value in scope["headers"])
        if size > self._max_head_bytes:
            raise ApiError(431, f"the request head has {size} bytes, limit {self._max_head_bytes}")

    def _check_key(self, scope: Scope) -> None:
        if not self._expected or scope["path"] in _OPEN_PATHS:
            return
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._expected):
            raise ApiError(401, "missing or wrong API key, send 'Authorization: Bearer KEY'")


def _shown(scope: Scope) -> str:
    return scope["path"].encode("unicode_escape").decode()


class _Exchange:
    """One request and its answer: adds the id to the answer and remembers what was sent."""

    def __init__(self, scope: Scope, send: Send) -> None:
        asked = Headers(scope=scope).get("x-request-id", "")
        self.request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        self._scope = scope
        self._send = send
        self._status = 0
        self._started_at = time.monotonic()

    async def send(self, message: Message) -> None:
        """Pass a message of the answer on."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Send an error, unless the answer has begun: then cutting it off is all that is left."""
        if self._status:
            return
        body = error.body()
        headers = [*error.headers, ("content-type", "application/json"), ("content-length", str(len(body)))]
        raw = [(name.encode(), value.encode()) for name, value in headers]
        await self.send({"type": "http.response.start", "status": error.status, "headers": raw})
        await self.send({"type": "http.response.body", "body": body})

    def log(self) -> None:
        """One line per request; status 499: the client hung up before the answer began."""
        quiet = self._scope["path"] in _POLLED_PATHS and self._status in _POLLED_STATUSES
        logger.log(
            logging.DEBUG if quiet else logging.INFO,
            "http id=%s method=%s path=%s status=%d ms=%d",
            self.request_id,
            self._scope["method"],
            _shown(self._scope),
            self._status or 499,
            round((time.monotonic() - self._started_at) * 1000),
        )
