"""Requests of unlike lengths for a server, through the client of tests.load: each says how long prompt and answer are."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter, process_time

import uvloop

from tests.load.call import Call, make_call
from tests.load.http1 import parse_address
from tests.load.options import LoadOptions
from tests.load.run import RunResult
from tests.load.service import Service


@dataclass(frozen=True, slots=True)
class Ask:
    """Lengths of one request, in tokens."""

    prompt: int
    answer: int


def options_of(url: str, asks: Sequence[Ask], concurrency: int, token_ids: int, seed: int) -> LoadOptions:
    """Of completions of random token ids below token_ids; answers are as long as they may be."""
    return LoadOptions(
        url=url, concurrency=concurrency, requests=len(asks), chat=False, token_ids=token_ids, ignore_eos=True,
        prompt_tokens=max(ask.prompt for ask in asks), max_tokens=max(ask.answer for ask in asks), seed=seed,
    )  # fmt: skip


def run_asks(asks: Sequence[Ask], options: LoadOptions) -> RunResult:
    """Send them in this order, so many at a time as the options say, and gather what became of them."""
    return uvloop.run(_run(asks, options))


async def _run(asks: Sequence[Ask], options: LoadOptions) -> RunResult:
    address = parse_address(options.base_url)
    service = Service(address, options.api_key)
    model, before = await service.first_model(), await service.spec_counters()
    rng = random.Random(f"asks {options.seed}")
    calls = [
        Call(index=i, prompt=rng.choices(range(options.token_ids), k=ask.prompt), stream=True, hang_up_point=None)
        for i, ask in enumerate(asks)
    ]
    waiting = iter(zip(calls, asks, strict=True))

    async def client() -> None:
        for call, ask in waiting:
            await make_call(call, replace(options, max_tokens=ask.answer), model, address, usual_s=1.0)

    start, cpu_start = perf_counter(), process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(options.concurrency, len(asks))):
            group.create_task(client())
    wall_s, client_cpu_s = perf_counter() - start, process_time() - cpu_start
    check = await service.settled_check(options.settle)
    return RunResult(
        calls=calls, wall_s=wall_s, client_cpu_s=client_cpu_s, model=model, server_info=await service.info(),
        counters_before=before, counters_after=await service.spec_counters(), check=check,
    )  # fmt: skip
