"""Cost of a Step for 32 requests: python -m tests.bench.rpc [--steps N] prints JSON.

step32_p50_us, step32_p99_us   round trip of a Step that commits 4 tokens and reserves 18 for each of 32 requests
step32_server_us               CPU time of the service's process per Step, all threads, the socket's included
step32_handle_us               of that the manager's part, by its own clock
scale_ratio                    round trip (p50) with a million pages over that with a thousand
hybrid_*                       the same figures with four kinds: a draft window, 48 pages of state and 96 of ring a request

All pools are filled to eviction first. Opens and closes are not timed: they come once in 64 steps.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median, quantiles

from memsvc.client import AdminClient, MemoryClient
from memsvc.registration import StepParts
from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.mem import Close, Commit, Opened, OpenReq, Reserve, Stepped
from tests.support.memsvc_process import cpu_seconds, memory_service

NUM_REQS = 32
PROMPT_LEN = 16
STEPS_PER_REQ = 64
ACCEPT_LEN = 4
RESERVE_LEN = 18
PAGE_BYTES = 256
FILL_LEN = 16_384
KINDS = [f"target_kv:{PAGE_BYTES}:16", f"draft_kv:{PAGE_BYTES}:16"]
HYBRID_KINDS = [
    f"target_kv:{PAGE_BYTES}:16",
    f"draft_kv:{PAGE_BYTES}:16:128",
    f"state:{PAGE_BYTES}:0:0:48:state",
    f"ring:{PAGE_BYTES}:0:0:96",
]
PROMPT_START = 1 << 20


class Load:
    """32 requests that generate in step, on one service."""

    def __init__(self, run_dir: Path, pid: int, kinds: list[str]) -> None:
        self.pid = pid
        self.client = MemoryClient(run_dir, timeout_s=30)
        self.admin = AdminClient(run_dir, timeout_s=60)
        self.client.register("bench", "target", kinds, "none")
        self.rids: list[ReqId] = []
        self.lens: list[int] = []
        self.round_trips: list[float] = []
        self.server_seconds = 0.0
        self.handle_seconds = 0.0
        self._next_rid = count(1)
        self._last_num = 0

    def step(self, parts: StepParts) -> Stepped:
        """A Step that nothing runs beside."""
        stepped = self.client.step(parts)
        self._last_num = stepped.num
        assert stepped.no_room is None, stepped.no_room
        return stepped

    def open_reqs(self, prompts: list[bytes]) -> None:
        """Close what is open, then open one request for each prompt and compute it whole."""
        closes = [Close(self.rids)] if self.rids else []
        self.step(StepParts(done_step=self._last_num, closes=closes))
        self.rids = [ReqId(next(self._next_rid)) for _ in prompts]
        opens = [
            OpenReq(rid, prompt, ACCEPT_LEN * STEPS_PER_REQ) for rid, prompt in zip(self.rids, prompts, strict=True)
        ]
        opened = self.step(StepParts(done_step=self._last_num, opens=opens)).opened
        assert all(isinstance(each, Opened) for each in opened), opened
        assert len(opened) == len(prompts), f"{len(opened)} of {len(prompts)} opened"
        self.lens = [len(prompt) // 4 for prompt in prompts]
        missing = [length - each.prefix_len for length, each in zip(self.lens, opened, strict=True)]
        self.step(StepParts(done_step=self._last_num, reserve=Reserve(self.rids, missing)))
        self.step(StepParts(commit=Commit(self.rids, self.lens, self.lens, [b""] * len(prompts))))

    def generate(self, num_steps: int) -> None:
        """Timed Steps; each request gets ACCEPT_LEN tokens in each."""
        tokens = [pack_tokens([self.rids[0], 2, 3, 4])] * len(self.rids)
        reserve = Reserve(self.rids, [RESERVE_LEN] * len(self.rids))
        self.step(StepParts(done_step=self._last_num, reserve=reserve))
        handle_before = self.admin.get_stats().step_seconds
        cpu_before = cpu_seconds(self.pid)
        for _ in range(num_steps):
            self.lens = [length + ACCEPT_LEN for length in self.lens]
            begin = time.perf_counter()
            commit = Commit(self.rids, self.lens, self.lens, tokens)
            self.step(StepParts(done_step=self._last_num, commit=commit, reserve=reserve))
            self.round_trips.append(time.perf_counter() - begin)
        self.server_seconds += cpu_seconds(self.pid) - cpu_before
        self.handle_seconds += self.admin.get_stats().step_seconds - handle_before

    def close(self) -> None:
        """Leave the service."""
        self.client.leave()
        self.client.close()
        self.admin.close()


def fill(load: Load, num_pages: int) -> None:
    """Publish prompts until the pool evicts."""
    for prompt in long_prompts(min(FILL_LEN, num_pages)):
        load.open_reqs([prompt])
        if any(load.admin.get_stats().evicted_pages):
            return


def long_prompts(length: int) -> Iterator[bytes]:
    """Prompts that share nothing."""
    for start in count(1):
        yield pack_tokens([start, *range(length - 1)])


def measure(pages: dict[str, int], num_steps: int) -> dict[str, Load]:
    """Run the load on a service of each size, in turns so that all see the same machine."""
    with ExitStack() as stack:
        loads = {}
        for name, num_pages in pages.items():
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            kinds = HYBRID_KINDS if name == "hybrid" else KINDS
            service = stack.enter_context(memory_service(run_dir, pool_flags(num_pages, kinds)))
            loads[name] = Load(run_dir, service.pid, [kind.partition(":")[0] for kind in kinds])
            stack.callback(loads[name].close)
            fill(loads[name], num_pages)
        prompts = staggered_prompts()
        for _ in range(max(1, num_steps // STEPS_PER_REQ)):
            for load in loads.values():
                load.open_reqs([next(prompts) for _ in range(NUM_REQS)])
                load.generate(STEPS_PER_REQ)
    return loads


def staggered_prompts() -> Iterator[bytes]:
    """Prompts of PROMPT_LEN and some more tokens: each step then takes a new page for a quarter of the requests."""
    for number in count():
        yield pack_tokens([PROMPT_START + number, *range(PROMPT_LEN + number % 16)])


def pool_flags(num_pages: int, kinds: list[str]) -> list[str]:
    """A pool of num_pages pages of equal size."""
    flags = ["--arena-bytes", str(num_pages * PAGE_BYTES), "--page-size", "16", "--low-watermark", "0"]
    return [*flags, *(flag for kind in kinds for flag in ("--kind", kind)), "--log-level", "WARNING"]


def figures_of(load: Load) -> dict[str, float]:
    """Microseconds by name."""
    num_steps = len(load.round_trips)
    seconds = {
        "step32_p50_us": median(load.round_trips),
        "step32_p99_us": quantiles(load.round_trips, n=100)[98],
        "step32_server_us": load.server_seconds / num_steps,
        "step32_handle_us": load.handle_seconds / num_steps,
    }
    return {name: round(value * 1e6, 1) for name, value in seconds.items()}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="Steps timed on each service")
    arguments = parser.parse_args()
    # Of both kinds together; 32 requests of 290 tokens hold about 1,200.
    loads = measure({"small": 2 * 1024, "large": 2 << 20, "hybrid": 2 << 20}, arguments.steps)
    figures = figures_of(loads["large"])
    ratio = median(loads["large"].round_trips) / median(loads["small"].round_trips)
    figures |= {"scale_ratio": round(ratio, 3), "num_steps": len(loads["large"].round_trips)}
    for pool in ("small", "hybrid"):
        figures |= {f"{pool}_{name}": value for name, value in figures_of(loads[pool]).items()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
