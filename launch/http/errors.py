"""Errors as OpenAI clients read them: one body shape for every status."""

import msgspec

from memsvc.wire.text import Failed

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
_STATUS_OF_FAILED = {"bad_request": 400, "too_large": 400, "overloaded": 503}

RETRY_AFTER_S = 1
"""What a client that was turned away for load is told to wait."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """code is the HTTP status; param names the field at fault, if one is."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and of the last event of a broken stream."""

    error: ErrorInfo


class ApiError(Exception):
    """Ends a request with an HTTP status and a message for the client."""

    def __init__(self, status: int, message: str, param: str | None = None, *, may_retry: bool = True) -> None:
        """may_retry False tells the client that the same request would meet the same end."""
        super().__init__(message)
        self.may_retry = may_retry
        self.status = status
        self.message = message
        self.param = param

    @classmethod
    def from_failed(cls, failed: Failed) -> "ApiError":
        """What a Failed of the tokenizer or the target means to the client."""
        return cls(_STATUS_OF_FAILED.get(failed.kind, 500), failed.message)

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Headers that go with the status."""
        if not self.may_retry:
            # OpenAI's clients send a request that was answered 500 again by themselves, unless this says no.
            return [("x-should-retry", "false")]
        match self.status:
            case 401:
                return [("www-authenticate", "Bearer")]
            case 429 | 503:
                return [("retry-after", str(RETRY_AFTER_S))]
            case 413 | 431:
                # What is left of the request is not read, so the connection can't be used again.
                return [("connection", "close")]
            case _:
                return []

    def body(self) -> bytes:
        """The JSON body."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode(ErrorBody(ErrorInfo(self.message, kind, self.param, self.status)))
