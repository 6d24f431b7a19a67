"""Cost of the allocator itself, without sockets: `python -m tests.bench.radix` prints JSON.

match_32k_us, open_32k_us: a cached prompt of 32k tokens, page 16. step32_core_us: a Step in which 32
requests commit 4 tokens each and reserve 8, in a pool of a million pages that is full of cached text,
so that new pages cost evictions; step32_small_us: the same in a pool of a thousand, measured in turn.
scale_ratio: the first over the second. init_s: making the large pool. Times are medians.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

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
STEPS = 24
"""Steps that a batch lives: then its requests hold about 7 pages each, as 1000 pages allow."""
CACHED_LEN = 512
"""Tokens of one cached conversation in the pools that are full of them."""


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

    def message(self, **parts: Any) -> Step:
        """The next step; all before it are done."""
        self.num += 1
        return Step(epoch=self.epoch, num=self.num, done_step=self.num - 1, **parts)

    def send(self, message: Step) -> Stepped:
        """Its reply, which must have found room."""
        reply = self.manager.handle(message)
        assert isinstance(reply, Stepped), reply
        assert reply.no_room is None, reply.no_room
        assert reply.open_no_room is None, reply.open_no_room
        return reply

    def step(self, **parts: Any) -> Stepped:
        """Send the next step."""
        return self.send(self.message(**parts))

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


class Batch:
    """A pool full of cached text, and 32 requests that grow in it, each at another place of its page."""

    def __init__(self, num_pages: int) -> None:
        num_frames = num_pages * 3 // 4  # one target page or three draft pages each, as many of both
        self.driver = Driver(num_frames)
        self._next_rid = 1
        for _ in range(num_frames * 3 // 4 * PAGE_SIZE // CACHED_LEN):
            self.driver.cache(self._rid(), [random.randrange(50_000) for _ in range(CACHED_LEN)])
        self._rids: list[ReqId] = []
        self._lens: list[int] = []

    def _rid(self) -> int:
        self._next_rid += 1
        return self._next_rid

    def renew(self) -> None:
        """Close the requests, whose text stays, and open others."""
        if self._rids:
            self.driver.step(closes=[Close(self._rids)])
        self._rids = [ReqId(self._rid()) for _ in range(BATCH)]
        self._lens = [PAGE_SIZE + index % PAGE_SIZE for index in range(BATCH)]
        for rid, length in zip(self._rids, self._lens, strict=True):
            self.driver.step(opens=[OpenReq(rid, pack_tokens([rid] * length), STEPS * ACCEPTED)])
        self.driver.step(reserve=Reserve(self._rids, [length + RESERVED for length in self._lens]))
        self._commit(self._lens)

    def _commit(self, lens: list[int]) -> float:
        tokens = [pack_tokens([1, 2, 3, 4])] * BATCH
        message = self.driver.message(
            commit=Commit(self._rids, list(lens), list(lens), tokens), reserve=Reserve(self._rids, [RESERVED] * BATCH)
        )
        began = time.perf_counter()
        self.driver.send(message)
        return time.perf_counter() - began

    def step(self) -> float:
        """Seconds that one step took."""
        self._lens = [length + ACCEPTED for length in self._lens]
        return self._commit(self._lens)


def batch_steps(large_pages: int, rounds: int) -> dict[str, float]:
    """The batch step in a small and a large pool."""
    small, large = Batch(1_000), Batch(large_pages)
    gc.collect()
    gc.freeze()  # as the service does
    times: dict[str, list[float]] = {"small": [], "large": []}
    for _ in range(rounds):
        small.renew()
        large.renew()
        for _ in range(STEPS - 1):
            times["small"].append(small.step())
            times["large"].append(large.step())
    gc.unfreeze()
    step32, step32_large = (statistics.median(times[name]) * 1e6 for name in ("small", "large"))
    return {
        "step32_core_us": step32_large,
        "step32_small_us": step32,
        "scale_ratio": step32_large / step32,
        "init_s": large.driver.init_s,
    }


def main(argv: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200, help="measurements of match and open")
    parser.add_argument("--rounds", type=int, default=20, help=f"rounds of {STEPS} batch steps")
    parser.add_argument("--large", type=int, default=1_000_000, help="pages of the large pool")
    args = parser.parse_args(argv)
    random.seed(1)
    results = long_prompt(args.times) | batch_steps(args.large, args.rounds)
    print(json.dumps({key: round(value, 3) for key, value in results.items()}))


if __name__ == "__main__":
    main(sys.argv[1:])
