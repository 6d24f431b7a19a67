"""Cost of the allocator itself, without sockets: `python -m tests.bench.radix` prints JSON.

match_32k_us, open_32k_us: a cached prompt of 32k tokens, page 16. step32_core_us: a Step in which 32
requests commit 4 tokens each and reserve 8, in a pool whose every other page is cached text, so that
each new page costs an eviction. scale_ratio: that Step in a pool of a million pages against a
thousand. Medians, in microseconds; init_s: making the pool of a million pages.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

from memsvc.core.config import PoolConfig
from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import Match
from memsvc.wire.base import WIRE_VERSION, Epoch, ReqId, pack_tokens
from memsvc.wire.mem import (
    Close,
    Commit,
    KindSpec,
    OpenReq,
    Register,
    Registered,
    Reserve,
    Step,
    Stepped,
)

PAGE_SIZE = 16
TARGET_BYTES, DRAFT_BYTES = 3072, 1024
LONG = 32768
BATCH, ACCEPTED, RESERVED = 32, 4, 8
CACHED_LEN = 512
"""Tokens of one cached conversation in the scale test."""


class Driver:
    """The shortest engine that can be written."""

    def __init__(self, num_frames: int, window: int = 0) -> None:
        kinds = [
            KindSpec(name="target_kv", page_bytes=TARGET_BYTES, tokens_per_page=PAGE_SIZE),
            KindSpec(name="draft_kv", page_bytes=DRAFT_BYTES, tokens_per_page=PAGE_SIZE, window=window),
        ]
        config = PoolConfig(arena_bytes=num_frames * TARGET_BYTES, page_size=PAGE_SIZE, kinds=kinds)
        began = time.perf_counter()
        self.manager = MemoryManager(config)
        self.init_s = time.perf_counter() - began
        self.num = 0
        self.epoch = Epoch(0)
        names = [kind.name for kind in kinds]
        reply = self.manager.handle(Register(WIRE_VERSION, "bench", "target", names, "model", 1))
        assert isinstance(reply, Registered)
        self.epoch = reply.epoch

    def message(self, commit: Commit | None = None, reserve: Reserve | None = None, **parts: list) -> Step:
        """The next step; all before it are done."""
        self.num += 1
        return Step(
            epoch=self.epoch, num=self.num, done_step=self.num - 1, commit=commit, reserve=reserve, **parts
        )

    def send(self, message: Step) -> Stepped:
        """Its reply, which must have found room."""
        reply = self.manager.handle(message)
        assert isinstance(reply, Stepped), reply
        assert reply.no_room is None, reply.no_room
        assert reply.open_no_room is None, reply.open_no_room
        return reply

    def step(self, **parts: object) -> Stepped:
        """Send the next step."""
        return self.send(self.message(**parts))  # type: ignore[arg-type]

    def cache(self, rid: int, tokens: list[int]) -> None:
        """Run a prompt through, so that it is cached afterwards."""
        rids, size = [ReqId(rid)], len(tokens)
        self.step(opens=[OpenReq(ReqId(rid), pack_tokens(tokens), 0)])
        self.step(reserve=Reserve(rids, [size]))
        self.step(commit=Commit(rids, [size], [size], [b""]), closes=[Close(rids)])


def median_us(measure: Callable[[], float], times: int) -> float:
    """Median of `times` measurements in seconds, as microseconds."""
    return statistics.median(measure() for _ in range(times)) * 1e6


def long_prompt(times: int) -> dict[str, float]:
    """Match and open of a cached prompt."""
    driver, tokens = Driver(8192), [random.randrange(50_000) for _ in range(LONG + 1)]
    driver.cache(1, tokens)
    packed, rid = pack_tokens(tokens), 1

    def match() -> float:
        began = time.perf_counter()
        reply = driver.manager.handle_admin(Match(tokens=packed))
        took = time.perf_counter() - began
        assert reply.prefix_len == LONG  # type: ignore[union-attr]
        return took

    def open_close() -> float:
        nonlocal rid
        rid += 1
        message = driver.message(opens=[OpenReq(ReqId(rid), packed, 8)])
        began = time.perf_counter()
        reply = driver.send(message)
        took = time.perf_counter() - began
        assert reply.opened[0].prefix_len == LONG  # type: ignore[union-attr]
        driver.step(closes=[Close([ReqId(rid)])])
        return took

    return {"match_32k_us": median_us(match, times), "open_32k_us": median_us(open_close, times)}


def batch_steps(num_pages: int, times: int) -> tuple[float, float]:
    """Median of the batch step in microseconds in a full pool of num_pages pages, and seconds to make it."""
    frames = num_pages * 3 // 4
    driver = Driver(frames)
    rids = [ReqId(1_000_000 + i) for i in range(BATCH)]
    cached_pages = frames * 3 // 4 - BATCH * 8
    for index in range(max(1, cached_pages // (CACHED_LEN // PAGE_SIZE))):
        driver.cache(index + 1, [random.randrange(50_000) for _ in range(CACHED_LEN)])
    driver.step(opens=[OpenReq(rid, pack_tokens([rid, 7]), 1 << 20) for rid in rids[:0]])
    max_new = min(frames // 4, 1 << 16)
    for rid in rids:
        driver.step(opens=[OpenReq(rid, pack_tokens([rid, 7]), max_new)])
    driver.step(reserve=Reserve(rids, [2 + RESERVED] * BATCH))
    tokens = [pack_tokens([1, 2, 3, 4])] * BATCH
    driver.step(commit=Commit(rids, [2] * BATCH, [2] * BATCH, tokens), reserve=Reserve(rids, [RESERVED] * BATCH))
    lens, samples = 2, []
    gc.collect()
    gc.freeze()
    for _ in range(times):
        lens += ACCEPTED
        message = driver.message(
            commit=Commit(rids, [lens] * BATCH, [lens] * BATCH, tokens),
            reserve=Reserve(rids, [RESERVED] * BATCH),
        )
        began = time.perf_counter()
        driver.send(message)
        samples.append(time.perf_counter() - began)
    gc.unfreeze()
    return statistics.fmean(sorted(samples)[: len(samples) * 9 // 10]) * 1e6, driver.init_s


def main(argv: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--large", type=int, default=1_000_000, help="pages of the large pool")
    args = parser.parse_args(argv)
    random.seed(1)
    results = long_prompt(args.times)
    small, _ = batch_steps(1_000, 32)
    large, init_s = batch_steps(args.large, args.times)
    results |= {"step32_core_us": large, "step32_small_us": small, "scale_ratio": large / small, "init_s": init_s}
    print(json.dumps({key: round(value, 3) for key, value in results.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
