"""One request of one client: send, read the answer, take the times."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter

import msgspec

from tests.load.answers import Answer, Choice, SseLines, Usage
from tests.load.http1 import Address, Exchange, HttpError, open_exchange, request_bytes
from tests.load.options import LoadOptions
from tests.load.prompts import Prompt

_answer = msgspec.json.Decoder(Answer)


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    DISCONNECTED = "disconnected"


@dataclass(kw_only=True, slots=True)
class Call:
    """A request and what became of it. Times are seconds on perf_counter's clock; 0.0 = did not happen."""

    index: int
    prompt: Prompt
    stream: bool
    hang_up_point: float | None
    """Fraction of a usual request's time after which this client hangs up; None stays to the end."""
    outcome: Outcome = Outcome.FAILED
    error: str = ""
    """Kind of failure, the same text for failures of the same kind."""
    detail: str = ""
    """What the server said about it."""
    start: float = 0.0
    first: float = 0.0
    last: float = 0.0
    num_chunks: int = 0
    """Chunks that carried text."""
    texts: list[str] = field(default_factory=list)
    finish_reason: str = ""
    usage: Usage | None = None
    spec_steps: int | None = None
    """Verify steps, None if the server did not say."""
    spec_accepted: int = 0

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.texts)

    @property
    def output_tokens(self) -> int:
        """From usage; a server that sends none is counted one token a chunk."""
        return self.usage.completion_tokens if self.usage is not None else self.num_chunks

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the server took from its cache."""
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return (details.cached_tokens or 0) if details is not None else 0

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text; None for a whole answer, which has no first part."""
        return self.first - self.start if self.stream and self.first else None

    @property
    def e2e_s(self) -> float:
        """Time to the last text."""
        return self.last - self.start

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there is no second."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class _Failure(Exception):
    """kind groups failures in the report, detail is one example."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = detail


def plan_call(options: LoadOptions, index: int, prompt: Prompt) -> Call:
    """The call for request index: whether and when it hangs up is a function of the seed alone."""
    rng = random.Random(f"hang up {options.seed} {index}")
    hangs_up = rng.random() < options.disconnect
    stream = not hangs_up or rng.random() < 0.5
    return Call(index=index, prompt=prompt, stream=stream, hang_up_point=rng.random() if hangs_up else None)


def _body(options: LoadOptions, call: Call, model: str) -> bytes:
    body: dict[str, object] = {
        "model": model,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed + call.index,
        "stream": call.stream,
    }
    if call.stream:
        body["stream_options"] = {"include_usage": True}
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.chat:
        body["messages"] = [{"role": "user", "content": call.prompt}]
    else:
        body["prompt"] = call.prompt
    return msgspec.json.encode(body)


def _decode(payload: bytes) -> Answer:
    try:
        answer = _answer.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Failure("answer is not what the API promises", str(error)) from error
    if answer.error is not None:
        body = answer.error
        if isinstance(body, str):
            raise _Failure("error in the answer", body)
        raise _Failure(f"error in the answer: {body.type or 'untyped'}", body.message)
    return answer


async def _payloads(exchange: Exchange) -> AsyncIterator[bytes]:
    """Payloads of an event stream up to [DONE]. Raises _Failure if the stream ends without it."""
    lines = SseLines()
    while piece := await exchange.piece():
        for payload in lines.feed(piece):
            if payload == b"[DONE]":
                return
            yield payload
    raise _Failure("stream ended without [DONE]")


def _take_choice(call: Call, choice: Choice) -> None:
    now = perf_counter()
    if choice.new_text:
        call.texts.append(choice.new_text)
        call.num_chunks += 1
        call.first = call.first or now
    if choice.finish_reason:
        call.finish_reason = choice.finish_reason
        call.first = call.first or now
    if choice.new_text or choice.finish_reason:
        call.last = now


def _take(call: Call, answer: Answer) -> None:
    for choice in answer.choices:
        _take_choice(call, choice)
    if answer.usage is not None:
        call.usage = answer.usage
    spec = answer.metrics.speculative_decoding if answer.metrics is not None else None
    if spec is not None:
        call.spec_steps, call.spec_accepted = spec.num_spec_steps, spec.num_accepted_draft_tokens


async def _read(call: Call, exchange: Exchange) -> None:
    status = await exchange.head()
    if status != 200:
        body = await exchange.rest()
        try:
            _decode(body)
        except _Failure as failure:
            raise _Failure(f"HTTP {status}", failure.detail) from None
        raise _Failure(f"HTTP {status}", body[:200].decode("utf-8", "replace"))
    if call.stream:
        async for payload in _payloads(exchange):
            _take(call, _decode(payload))
    else:
        _take(call, _decode(await exchange.rest()))
    if not call.finish_reason:
        raise _Failure("answer without a finish_reason")


async def _talk(call: Call, address: Address, request: bytes) -> None:
    exchange = await open_exchange(address, request)
    try:
        await _read(call, exchange)
        call.outcome = Outcome.COMPLETED
    finally:
        await exchange.close()


async def make_call(call: Call, options: LoadOptions, model: str, address: Address, usual_s: float) -> None:
    """Carry out call and fill it in; never raises for anything the server does.

    usual_s: how long a request takes as a rule, the scale of hang_up_point.
    """
    request = request_bytes(address, "POST", options.path, _body(options, call, model), options.api_key)
    limit_s = options.timeout if call.hang_up_point is None else call.hang_up_point * usual_s
    call.start = call.last = perf_counter()
    try:
        async with asyncio.timeout(limit_s):
            await _talk(call, address, request)
    except TimeoutError:
        # The time may also run out while a complete answer's connection closes.
        if call.outcome is Outcome.COMPLETED:
            return
        if call.hang_up_point is not None:
            call.outcome = Outcome.DISCONNECTED
        else:
            call.error, call.detail = "timeout", f"after {options.timeout:g} s"
    except HttpError as error:
        call.error, call.detail = "connection", str(error)
    except _Failure as failure:
        call.error, call.detail = failure.kind, failure.detail
