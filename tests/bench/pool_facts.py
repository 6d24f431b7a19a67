"""Facts of the 27B geometry that need no load: what fits at once, geometry's waste, the price of a Step."""

import gc
import statistics
import time

import numpy as np

import memsvc.core
from memsvc.core.geometry import solve
from memsvc.wire.base import ReqId
from memsvc.wire.mem import OpenReq
from tests.bench.pool_loads import random_text
from tests.bench.pool_memory import Turn, UnifiedMemory, make_memory
from tests.bench.pool_modes import (
    BLOCK_SIZE,
    COMMITTED,
    GIB,
    MAX_EXTEND,
    PAGE_SIZE,
    Mode,
    make_mode,
)

AHEAD = 2 * BLOCK_SIZE
PROMPT = 4096
ANSWER = 256
CACHED = 1536
"""Tokens of each conversation that a warm tree is full of."""
STEP32_PROMPT = 1000
STEP32_ROUND = 60
"""Steps before the 32 requests are replaced."""


class Filler:
    """Opens requests in a pool, one after the other, and computes their prompts."""

    def __init__(self, mode: Mode) -> None:
        self.memory: UnifiedMemory = make_memory(mode)
        self._rng = np.random.default_rng(1)
        self.rids: list[ReqId] = []
        self.lens: list[int] = []
        self._next = 0

    def add(self, num_tokens: int, answer: int = ANSWER) -> bool:
        """Whether one more request has got all slots of its prompt and of its first two blocks."""
        self._next += 1
        rid, text = ReqId(self._next), random_text(self._rng, num_tokens)
        opened = self.memory.send(Turn(opens=[OpenReq(rid, text, answer)]))
        if not opened.admitted:
            return False
        for done in range(0, num_tokens, MAX_EXTEND):
            end = min(num_tokens, done + MAX_EXTEND)
            if self.memory.send(Turn(reserve_rids=[rid], nums=[end - done])).victims is not None:
                return False
            self.memory.send(Turn(rids=[rid], lens=[end], tokens=[b""]))
        if self.memory.send(Turn(reserve_rids=[rid], nums=[AHEAD])).victims is not None:
            return False
        self.rids.append(rid)
        self.lens.append(num_tokens)
        return True

    def warm(self, num_bytes: int) -> None:
        """Fill the pool with cached conversations, each with its last state, until they evict each other."""
        state = self.memory.mode.config.kinds[2]
        each = CACHED // PAGE_SIZE * sum(self.memory.mode.content_bytes[:2]) + state.pages_per_req * state.page_bytes
        for _ in range(-(-5 * num_bytes // (4 * each))):
            assert self.add(CACHED)
            self.close_all()

    def close_all(self) -> None:
        """Everyone ends, and leaves a state at its last page."""
        at = [length // PAGE_SIZE * PAGE_SIZE for length in self.lens]
        freezes = [(rid, length, b"") for rid, length in zip(self.rids, at, strict=True)]
        self.memory.send(Turn(freezes=freezes, closes={"finish": self.rids}))
        self.memory.send(Turn())
        self.rids, self.lens = [], []

    def block_turn(self) -> Turn:
        """Everyone commits a block's tokens and asks for the slots of the two after it."""
        self.lens = [length + COMMITTED for length in self.lens]
        tokens = [random_text(self._rng, COMMITTED) for _ in self.lens]
        nums = [AHEAD] * len(self.lens)
        return Turn(
            rids=list(self.rids), lens=list(self.lens), tokens=tokens, reserve_rids=list(self.rids), nums=nums
        )  # fmt: skip


def requests_at_once(gib: int, warm: bool = False, mode: str = "unified") -> int:
    """Requests of 4,096 prompt tokens that a pool takes, all computed and with slots for their first blocks."""
    filler = Filler(make_mode(mode, gib * GIB))
    if warm:
        filler.warm(gib * GIB)
    while filler.add(PROMPT):
        pass
    return len(filler.rids)


def runs_to_the_end(gib: int, num_reqs: int, total: int = PROMPT) -> dict[str, int | bool]:
    """Whether so many requests of `total` tokens, prompt and answer, are open at once and all reach their end."""
    filler = Filler(make_mode("unified", gib * GIB))
    opened = 0
    while opened < num_reqs and filler.add(total - ANSWER):
        opened += 1
    generated = 0
    while opened == num_reqs and generated + COMMITTED + AHEAD <= ANSWER:
        if filler.memory.send(filler.block_turn()).victims is not None:
            break
        generated += COMMITTED
    return {"requests": opened, "fits": opened == num_reqs, "answered": generated + AHEAD, "of": ANSWER}


def geometry_waste() -> dict[str, object]:
    """By kind the share of its frames that holds nothing, and the share of a 4,096-token request's frames."""
    kinds = make_mode("unified", 60 * GIB).config.kinds
    geometry, names = solve(kinds), [kind.name for kind in kinds]
    held = [kind.pages_per_req or -(-min(PROMPT, kind.window or PROMPT) // PAGE_SIZE) for kind in kinds]
    content = sum(pages * kind.page_bytes for pages, kind in zip(held, kinds, strict=True))
    cut = sum(pages * geometry.stride_bytes(index) for index, pages in enumerate(held))
    return {
        "frame_bytes": geometry.frame_bytes,
        "pages_per_frame": dict(zip(names, geometry.pages_per_frame, strict=True)),
        "by_kind": dict(zip(names, geometry.waste, strict=True)),
        "request_4k": 1 - content / cut,
    }


def step32(rounds: int) -> dict[str, object]:
    """Microseconds of CPU for a Step of 32 requests, four kinds, in a warm 30 GiB pool; opens and closes apart."""
    filler = Filler(make_mode("unified", 30 * GIB))
    filler.warm(30 * GIB)
    times: list[float] = []
    for _ in range(rounds):
        for index in range(32):
            assert filler.add(STEP32_PROMPT + index, (STEP32_ROUND + 1) * COMMITTED + AHEAD)
        gc.collect()
        gc.disable()
        for _ in range(STEP32_ROUND):
            turn, began = filler.block_turn(), time.process_time()
            granted = filler.memory.send(turn)
            times.append(time.process_time() - began)
            assert granted.victims is None
        gc.enable()
        filler.close_all()
    times.sort()
    return {
        "median": statistics.median(times) * 1e6,
        "p99": times[int(0.99 * len(times))] * 1e6,
        "steps": len(times),
        "compiled": memsvc.core.COMPILED,
    }


def all_facts(rounds: int) -> dict[str, object]:
    """What the benchmark reports beside its rows."""
    step = step32(rounds)
    return {
        "requests_4k_60gib": requests_at_once(60),
        "requests_4k_60gib_warm": requests_at_once(60, warm=True),
        "requests_4k_60gib_padded": requests_at_once(60, mode="padded"),
        "requests_4k_30gib": requests_at_once(30),
        "run_60_of_4k_in_30gib": runs_to_the_end(30, 60),
        "run_32_of_4k_in_16gib": runs_to_the_end(16, 32),
        "geometry_waste": geometry_waste(),
        "step32_server_us": step["median"],
        "step32": step,
    }
