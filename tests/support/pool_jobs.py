"""Jobs and engines for tests of the pool benchmark."""

import numpy as np

from tests.bench.pool_engine import Engine
from tests.bench.pool_loads import Job, random_text
from tests.bench.pool_memory import make_memory
from tests.bench.pool_modes import make_mode
from tests.bench.pool_record import Record


def text_of(seed: int, num_tokens: int = 16) -> bytes:
    """Packed tokens that no other seed has."""
    return random_text(np.random.default_rng(seed), num_tokens)


def job(seed: int, prompt_len: int, answer: int, arrival_s: float = 0.0) -> Job:
    """A request of its own text."""
    return Job(arrival_s, prompt_len, text_of(seed, prompt_len + answer))


def engine(mode: str, arena_bytes: int, jobs: list[Job], ratio: float = 0.0) -> Engine:
    """An engine that records from its first step on."""
    return Engine(make_memory(make_mode(mode, arena_bytes, ratio)), jobs, Record(0))


def run(served: Engine, num_steps: int) -> None:
    """Some steps."""
    for _ in range(num_steps):
        served.step()
