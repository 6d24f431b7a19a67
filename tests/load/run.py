"""The run itself: a fixed number of clients that take requests from one list."""

import asyncio
import contextlib
import statistics
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

from tests.load.answers import Check
from tests.load.call import Call, Outcome, make_call, plan_call
from tests.load.http1 import parse_address
from tests.load.options import LoadOptions
from tests.load.progress import Progress
from tests.load.prompts import make_prompts
from tests.load.service import Service, SpecCounters


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Everything that was seen; tests.load.report makes figures of it."""

    calls: list[Call]
    """One per request, in order of index."""
    wall_s: float
    client_cpu_s: float
    """Processor time of the load generator itself."""
    model: str
    server_info: Any
    counters_before: SpecCounters | None
    counters_after: SpecCounters | None
    check: Check | None


class _Clients:
    """The clients of a run and what they learn of each other: how long a request takes as a rule."""

    def __init__(self, options: LoadOptions, model: str) -> None:
        self._options = options
        self._model = model
        self._address = parse_address(options.base_url)
        self._times: list[float] = []
        self.calls = [plan_call(options, i, prompt) for i, prompt in enumerate(make_prompts(options))]
        self.progress = Progress(len(self.calls))
        self._waiting = iter(self.calls)

    async def client(self) -> None:
        """Make one call after the other until none is left."""
        for call in self._waiting:
            self.progress.running += 1
            usual_s = statistics.median(self._times) if self._times else self._options.hang_up_s
            await make_call(call, self._options, self._model, self._address, usual_s)
            self.progress.running -= 1
            self.progress.ended(call)
            if call.outcome is Outcome.COMPLETED:
                self._times.append(call.e2e_s)


async def run_load(options: LoadOptions) -> RunResult:
    """Send all requests and gather the outcome. Raises ConnectionError if the server is not there at all.

    Raises ValueError for a prompt file without prompts.
    """
    service = Service(parse_address(options.base_url), options.api_key)
    model = options.model or await service.first_model()
    clients = _Clients(options, model)
    before = await service.spec_counters()
    shown = asyncio.create_task(clients.progress.show())
    start, cpu_start = perf_counter(), process_time()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(options.concurrency, options.requests)):
                group.create_task(clients.client())
        wall_s, client_cpu_s = perf_counter() - start, process_time() - cpu_start
    finally:
        shown.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await shown
    check = await service.settled_check(options.settle)
    return RunResult(
        calls=clients.calls,
        wall_s=wall_s,
        client_cpu_s=client_cpu_s,
        model=model,
        server_info=await service.info(),
        counters_before=before,
        counters_after=await service.spec_counters(),
        check=check,
    )
