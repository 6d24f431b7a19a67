"""What an OpenAI-compatible server answers, as far as the load generator reads it."""

from typing import Any

import msgspec


class ErrorBody(msgspec.Struct):
    """Inside {"error": ...}."""

    message: str = ""
    type: str | None = None


class Part(msgspec.Struct):
    """delta of a chat chunk, or message of a whole chat answer."""

    content: str | None = None


class Choice(msgspec.Struct):
    """One choice of either route, streamed or whole."""

    text: str | None = None
    delta: Part | None = None
    message: Part | None = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        """The text it carries, empty if none."""
        part = self.delta or self.message
        return (part.content if part is not None else self.text) or ""


class PromptDetails(msgspec.Struct):
    """usage.prompt_tokens_details."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """usage."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class SpecDecoding(msgspec.Struct):
    """metrics.speculative_decoding: acceptance of one request. mean_acceptance_length counts the bonus token."""

    num_spec_steps: int = 0
    num_accepted_draft_tokens: int = 0


class Metrics(msgspec.Struct):
    """metrics of the usage chunk."""

    speculative_decoding: SpecDecoding | None = None


class Answer(msgspec.Struct):
    """A streamed chunk, a whole answer, or an error."""

    choices: list[Choice] = []
    usage: Usage | None = None
    metrics: Metrics | None = None
    error: ErrorBody | str | None = None


class Model(msgspec.Struct):
    """One entry of /v1/models."""

    id: str


class Models(msgspec.Struct):
    """/v1/models."""

    data: list[Model]


class Check(msgspec.Struct):
    """GET /check: the memory service's own audit. pages: kind -> state -> pages."""

    idle: bool
    leaked_bytes: int
    problems: list[Any] = []
    pages: dict[str, dict[str, int]] = {}


class SseLines:
    """Cuts a byte stream into the payloads of its data lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Payloads completed by piece. Comments and other fields are dropped."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
