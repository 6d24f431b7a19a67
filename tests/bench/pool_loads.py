"""Loads of the pool benchmark: who arrives when, with which tokens, and how long the answer is.

Texts are packed int32, made once, and the same in all modes. Arrivals start with a backlog that fills
the pool, and go on at more than it can serve.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from tests.bench.pool_modes import (
    COMMITTED,
    DRAFT_TOKEN_BYTES,
    DRAFT_WINDOW,
    MAX_EXTEND,
    MAX_RUNNING,
    RING_BYTES,
    STATE_BYTES,
    STATE_LAYERS,
    TARGET_TOKEN_BYTES,
)

MAX_PROMPT = 32_768
"""Longer prompts of a trace are cut to this: every mode and size can hold one."""
MAX_NEW = 2_048
TRACE_BLOCK = 512
"""Tokens that one hash id of the Mooncake trace stands for."""
SAMPLE = 200
"""Requests whose mean size and length scale the arrivals."""
BACKLOG, OVERLOAD = 1.3, 1.4
"""Of what the pool can hold at the start, and of what it can serve from then on."""
LONG_FROM, LONG_TO = 0.4, 0.7
"""The shifting load is long between these parts of its time."""

DISTRIBUTIONS = {
    "short": "prompt uniform 100-1,000, answer uniform 50-300, nothing shared",
    "long": "prompt uniform 16,384-32,768, answer uniform 200-1,000, nothing shared",
    "mixed": "prompt log-uniform 100-32,768, answer uniform 100-1,000, nothing shared",
    "shifting": "as short; from 40 to 70 % of the time prompts as long, answers as short; who still waits at a "
    "change gives up",
    "mooncake": "prompts of 512-token blocks by the trace's ids, cut to 32,768; answers of its lengths",
    "mooncake-like": "60 % new conversations, prompt log-normal (median 6,000, sigma 1.1) after one of 4 shared "
    "heads of 512; 40 % next turns: the whole text so far and log-normal (median 600, sigma 1); cut to 32,768; "
    "answer log-normal (median 300, sigma 0.7), at most 2,048",
    "azure": "prompt and answer lengths of the trace, nothing shared",
    "azure-like": "prompt log-normal (median 800, sigma 0.9) up to 4,096, answer log-normal (median 150, sigma 0.8) "
    "up to 1,000, nothing shared",
}


@dataclass(slots=True, eq=False)
class Job:
    """A request as its client sees it."""

    arrival_s: float
    prompt_len: int
    text: bytes
    """Prompt and answer."""
    gives_up_s: float = math.inf

    @property
    def end_len(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.text) // 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Columns of a trace file: seconds, prompt and answer tokens, and block ids where it has them."""

    times: list[float]
    prompts: list[int]
    answers: list[int]
    blocks: list[list[int]] = field(default_factory=list)


def read_mooncake(path: Path) -> Trace:
    """mooncake_conversation.jsonl."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return Trace(
        times=[row["timestamp"] / 1000 for row in rows],
        prompts=[row["input_length"] for row in rows],
        answers=[row["output_length"] for row in rows],
        blocks=[row["hash_ids"] for row in rows],
    )


def read_azure(path: Path) -> Trace:
    """azure_conv.csv; its times of day are turned into seconds since the first."""
    rows = list(csv.reader(path.read_text("utf-8").splitlines()))[1:]
    days = np.array([row[0] for row in rows], dtype="datetime64[us]")
    seconds = (days - days[0]).astype(np.int64) / 1e6
    return Trace(
        times=seconds.tolist(), prompts=[int(row[1]) for row in rows], answers=[int(row[2]) for row in rows]
    )  # fmt: skip


Sizes = Iterator[tuple[int, int]]
"""Prompt and answer lengths, without end."""


def _uniform(rng: np.random.Generator, prompt: tuple[int, int], answer: tuple[int, int]) -> Sizes:
    while True:
        yield int(rng.integers(*prompt, endpoint=True)), int(rng.integers(*answer, endpoint=True))


def _mixed(rng: np.random.Generator) -> Sizes:
    while True:
        yield int(100 * (MAX_PROMPT / 100) ** rng.random()), int(rng.integers(100, 1000, endpoint=True))


def _azure_like(rng: np.random.Generator) -> Sizes:
    while True:
        prompt, answer = rng.lognormal(math.log(800), 0.9), rng.lognormal(math.log(150), 0.8)
        yield min(4096, max(1, int(prompt))), min(1000, max(1, int(answer)))


def short(rng: np.random.Generator) -> Sizes:
    """Of the load of that name."""
    return _uniform(rng, (100, 1000), (50, 300))


def long(rng: np.random.Generator) -> Sizes:
    """Of the load of that name."""
    return _uniform(rng, (MAX_PROMPT // 2, MAX_PROMPT), (200, 1000))


def _long_prompts(rng: np.random.Generator) -> Sizes:
    return _uniform(rng, (MAX_PROMPT // 2, MAX_PROMPT), (50, 300))


SIZES: dict[str, Callable[[np.random.Generator], Sizes]] = {
    "short": short,
    "long": long,
    "mixed": _mixed,
    "azure-like": _azure_like,
}


def random_text(rng: np.random.Generator, num_tokens: int) -> bytes:
    """Tokens that nothing else has."""
    return rng.integers(0, 2**31 - 1, num_tokens, dtype=np.int32).tobytes()


def _texts(rng: np.random.Generator, sizes: Sizes) -> Iterator[tuple[int, bytes]]:
    for prompt, answer in sizes:
        yield prompt, random_text(rng, prompt + answer)


def _conversations(rng: np.random.Generator) -> Iterator[tuple[int, bytes]]:
    """The mooncake-like load; an answer is part of the next turn's prompt."""
    heads = [random_text(rng, TRACE_BLOCK) for _ in range(4)]
    known: list[bytes] = []
    while True:
        if known and rng.random() < 0.4:
            text = known.pop(int(rng.integers(max(0, len(known) - 64), len(known))))
            text += random_text(rng, 1 + int(rng.lognormal(math.log(600), 1)))
        else:
            text = heads[int(rng.integers(4))] + random_text(rng, 1 + int(rng.lognormal(math.log(6000), 1.1)))
        text = text[: 4 * MAX_PROMPT]
        answer = min(MAX_NEW, 1 + int(rng.lognormal(math.log(300), 0.7)))
        whole = text + random_text(rng, answer)
        if len(whole) < 4 * MAX_PROMPT:
            known.append(whole)
        yield len(text) // 4, whole


def _traced(rng: np.random.Generator, trace: Trace, first: int) -> Iterator[tuple[int, bytes]]:
    """Requests of a trace from its row `first` on, over and over; equal ids are equal blocks."""
    blocks: dict[int, bytes] = {}
    index = first
    while True:
        row = index % len(trace.prompts)
        prompt, answer = min(MAX_PROMPT, max(1, trace.prompts[row])), min(MAX_NEW, max(1, trace.answers[row]))
        if trace.blocks:
            ids = trace.blocks[row][: -(-prompt // TRACE_BLOCK)]
            for block in ids:
                if block not in blocks:
                    blocks[block] = random_text(rng, TRACE_BLOCK)
            text = b"".join(blocks[block] for block in ids)[: 4 * prompt]
            prompt = len(text) // 4
        else:
            text = random_text(rng, prompt)
        yield prompt, text + random_text(rng, answer)
        index += 1


def _gaps(rng: np.random.Generator, trace: Trace | None, first: int) -> Iterator[float]:
    """Seconds between arrivals, with a mean of 1; a trace's own gaps, scaled."""
    if trace is None:
        while True:
            yield rng.exponential()
    mean = (trace.times[-1] - trace.times[0]) / (len(trace.times) - 1)
    index = first
    while True:
        row = index % (len(trace.times) - 1)
        yield max(0.0, trace.times[row + 1] - trace.times[row]) / mean
        index += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Horizon:
    """What arrivals are scaled to."""

    arena_bytes: int
    seconds: float
    step_s: float


def make_jobs(name: str, seed: int, horizon: Horizon, trace: Trace | None = None) -> list[Job]:
    """The requests of one load, in order of arrival. trace is for the loads of that name."""
    rng = np.random.default_rng([seed, *name.encode()])
    if name == "shifting":
        return _shifting(seed, horizon)
    first = (seed * len(trace.prompts)) // 5 if trace else 0
    return _timed(_texts_of(name, rng, trace, first), horizon, _gaps(rng, trace, first))


def _texts_of(name: str, rng: np.random.Generator, trace: Trace | None, first: int) -> Iterator[tuple[int, bytes]]:
    if trace is not None:
        return _traced(rng, trace, first)
    return _conversations(rng) if name == "mooncake-like" else _texts(rng, SIZES[name](rng))


def _timed(texts: Iterator[tuple[int, bytes]], horizon: Horizon, gaps: Iterator[float]) -> list[Job]:
    """A backlog at once, then one for each gap; rate and backlog by what the first requests hold and last."""
    sample = [next(texts) for _ in range(SAMPLE)]
    held = sum(held_bytes(prompt, len(text) // 4) for prompt, text in sample) / SAMPLE
    steps = sum(num_steps(prompt, len(text) // 4) for prompt, text in sample) / SAMPLE
    capacity = min(MAX_RUNNING, horizon.arena_bytes / held)
    per_second = OVERLOAD * capacity / (steps * horizon.step_s)
    texts = chain(sample, texts)
    jobs = [Job(0.0, *next(texts)) for _ in range(int(BACKLOG * capacity))]
    now = 0.0
    while (now := now + next(gaps) / per_second) <= horizon.seconds:
        jobs.append(Job(now, *next(texts)))
    return jobs


def held_bytes(prompt_len: int, end_len: int) -> float:
    """About what a running request must hold: KV of its mean length, its draft's window, a state and a ring."""
    tokens = (prompt_len + end_len) / 2
    draft = min(tokens, DRAFT_WINDOW) * DRAFT_TOKEN_BYTES
    return tokens * TARGET_TOKEN_BYTES + draft + STATE_LAYERS * (STATE_BYTES + RING_BYTES)


def num_steps(prompt_len: int, end_len: int) -> float:
    """About how many steps it runs when nothing holds it up."""
    return prompt_len / MAX_EXTEND + (end_len - prompt_len) / COMMITTED + 2


def _shifting(seed: int, horizon: Horizon) -> list[Job]:
    """Three parts, each with arrivals of its own; who is not served in his part gives up."""
    jobs: list[Job] = []
    bounds = [0.0, LONG_FROM * horizon.seconds, LONG_TO * horizon.seconds, horizon.seconds]
    for part, sizes in enumerate((short, _long_prompts, short)):
        rng = np.random.default_rng([seed, part])
        begin, end = bounds[part], bounds[part + 1]
        own = Horizon(arena_bytes=horizon.arena_bytes, seconds=end - begin, step_s=horizon.step_s)
        timed = _timed(_texts(rng, sizes(rng)), own, _gaps(rng, None, 0))
        jobs += [Job(begin + job.arrival_s, job.prompt_len, job.text, end) for job in timed]
    return jobs
