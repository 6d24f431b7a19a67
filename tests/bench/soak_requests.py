"""Requests of the soak: what one asks for follows from seed and number, and each is read to its very end, or left."""

import asyncio
import math
import random
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec

from tests.bench.short_prompts import PROMPTS
from tests.load.answers import Answer, SseLines
from tests.load.call import Outcome
from tests.load.http1 import Address, Exchange, HttpError, open_exchange, request_bytes
from tests.load.prompts import WORDS

_STOPS = (". ", "\n\n", " and", " time", "ing", "4", " 300", "}")
_SHARED = " ".join(random.Random("shared").choices(WORDS, k=120))
"""Prompts that begin with a part of it find that in the prefix cache."""

_answer = msgspec.json.Decoder(Answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """What requests are drawn from."""

    seed: int
    raw: bool
    """Texts to go on with instead of chat messages."""
    prompt_words: int
    """Most words that are put together for a prompt."""
    max_tokens: int
    """Longest answer."""
    cancel: float
    """Share of clients that leave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request before it is sent."""

    index: int
    path: str
    body: dict[str, Any]
    hang_up: float | None
    """Fraction of a usual request's time after which the client leaves; None: it stays."""


@dataclass(kw_only=True, slots=True)
class Ended:
    """What became of a request."""

    index: int
    max_tokens: int
    outcome: Outcome = Outcome.FAILED
    error: str = ""
    finishes: list[str] = field(default_factory=list)
    """Every finish reason that came; there should be one."""
    num_ends: int = 0
    """Ends that were told: [DONE] of a stream, the body of a whole answer."""
    output_tokens: int = 0
    steps: int = 0
    """Blocks that were verified for it."""
    accepted: int = 0
    seconds: float = 0.0


class _Wrong(Exception):
    """What the server did that it should not."""


def plan(mix: Mix, index: int) -> Asked:
    """The same mix and index give the same request."""
    rng = random.Random(f"soak {mix.seed} {index}")
    text = _prompt(rng, mix.prompt_words)
    body: dict[str, Any] = {"prompt": text} if mix.raw else {"messages": [{"role": "user", "content": text}]}
    body |= {"max_tokens": rng.randint(1, mix.max_tokens), "seed": rng.randrange(1 << 31)} | _sampling(rng)
    body["stream"] = rng.random() < 0.75
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    leaves = rng.random() < mix.cancel
    path = "/v1/completions" if mix.raw else "/v1/chat/completions"
    return Asked(index=index, path=path, body=body, hang_up=rng.random() if leaves else None)


def _prompt(rng: random.Random, most_words: int) -> str:
    """A question, words, or both; lengths are spread evenly over their orders of magnitude."""
    parts = []
    if rng.random() < 0.25:
        parts.append(_SHARED[: rng.randrange(len(_SHARED))])
    if rng.random() < 0.5:
        parts.append(" ".join(rng.choices(WORDS, k=round(math.exp(rng.uniform(0, math.log(most_words)))))))
    if not parts or rng.random() < 0.5:
        parts.append(rng.choice(PROMPTS))
    return " ".join(parts).strip() or rng.choice(PROMPTS)


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Nine in ten are sampled; each other option is there in one or two of ten."""
    found: dict[str, Any] = {"temperature": round(rng.uniform(0.2, 1.5), 3) if rng.random() < 0.9 else 0.0}
    options = {
        "top_p": round(rng.uniform(0.3, 1.0), 3),
        "top_k": rng.randint(1, 100),
        "min_p": round(rng.uniform(0.0, 0.2), 3),
        "presence_penalty": round(rng.uniform(-0.5, 1.5), 3),
        "frequency_penalty": round(rng.uniform(-0.2, 1.0), 3),
        "repetition_penalty": round(rng.uniform(1.0, 1.3), 3),
        "stop": rng.sample(_STOPS, rng.randint(1, 3)),
        "ignore_eos": True,
    }
    return found | {name: value for name, value in options.items() if rng.random() < 0.15}


async def ask(asked: Asked, address: Address, usual_s: float, timeout_s: float) -> Ended:
    """Send it and read the answer; never raises for anything the server does.

    usual_s: how long a request takes as a rule, the scale of hang_up.
    """
    request = request_bytes(address, "POST", asked.path, msgspec.json.encode(asked.body))
    ended = Ended(index=asked.index, max_tokens=asked.body["max_tokens"])
    started = perf_counter()
    try:
        async with asyncio.timeout(timeout_s if asked.hang_up is None else asked.hang_up * usual_s):
            await _talk(ended, asked, address, request)
    except TimeoutError:
        # The time may also run out while a complete answer's connection closes.
        if ended.outcome is not Outcome.COMPLETED:
            ended.outcome = Outcome.FAILED if asked.hang_up is None else Outcome.DISCONNECTED
            ended.error = f"no end within {timeout_s:g} s" if asked.hang_up is None else ""
    except (HttpError, _Wrong) as error:
        ended.error = str(error)
    ended.seconds = perf_counter() - started
    return ended


async def _talk(ended: Ended, asked: Asked, address: Address, request: bytes) -> None:
    exchange = await open_exchange(address, request)
    try:
        if (status := await exchange.head()) != 200:
            raise _Wrong(f"HTTP {status}: {(await exchange.rest())[:200].decode('utf-8', 'replace')}")
        if asked.body["stream"]:
            await _read_stream(ended, exchange)
        else:
            _take(ended, await exchange.rest())
            ended.num_ends += 1
        ended.outcome = Outcome.COMPLETED
    finally:
        await exchange.close()


async def _read_stream(ended: Ended, exchange: Exchange) -> None:
    """Up to the end of the body: what comes after [DONE] counts too."""
    lines = SseLines()
    while piece := await exchange.piece():
        for payload in lines.feed(piece):
            if payload == b"[DONE]":
                ended.num_ends += 1
            else:
                _take(ended, payload)


def _take(ended: Ended, payload: bytes) -> None:
    """A chunk of a stream, or a whole answer."""
    try:
        answer = _answer.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Wrong(f"no answer of the API: {error}") from error
    if answer.error is not None:
        raise _Wrong(f"error in the answer: {payload[:200].decode('utf-8', 'replace')}")
    ended.finishes += [choice.finish_reason for choice in answer.choices if choice.finish_reason]
    if answer.usage is not None:
        ended.output_tokens = answer.usage.completion_tokens
    if answer.metrics is not None and (spec := answer.metrics.speculative_decoding) is not None:
        ended.steps, ended.accepted = spec.num_spec_steps, spec.num_accepted_draft_tokens
