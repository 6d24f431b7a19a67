"""A long run of sampled decoding with requests coming, going and leaving, and what must hold after it.

    python -m tests.bench.soak --steps 12000 --json FILE -- --device cuda

starts a server, with random weights of the tiny geometry or with --model, and keeps --concurrency requests in flight,
all unlike each other (soak_requests.py), until the target has made so many steps that verified drafts. Then the table
of the run is printed, and whether each check holds (soak_checks.py). Ends with 1 if one does not.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import uvloop

from target_worker.train.flags import parse
from tests.bench.ladder import facts
from tests.bench.ladder_geometry import LADDERS
from tests.bench.served_models import DRAFT_HELP, TARGET_HELP, ServedModel, find_model
from tests.bench.soak_checks import Run, check_all, table
from tests.bench.soak_requests import Ended, Mix, ask, plan
from tests.bench.soak_watch import Reading, read_metrics, windows
from tests.load.answers import Check
from tests.load.call import Outcome
from tests.load.http1 import Address, HttpError, get, open_exchange, parse_address, request_bytes
from tests.load.report import without_folders
from tests.load.service import Service
from tests.support.served import Served

_TINY = "tiny"
_READY_S = 400.0
"""Kernels are compiled and graphs captured before the first request."""
_POLL_S = 0.25
"""The target tells its counters that often."""
_MOST_FAILED = 20
"""Failed requests, or readings in a row without an answer, after which no more are sent."""
_SETTLE_S = 30.0
_USUAL = 64
"""Newest answers whose times say how long a request takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakOptions:
    """How long, and with what."""

    steps: int = 12000
    """Steps that verify drafts, at least."""
    concurrency: int = 8
    """Requests in flight at a time."""
    windows: int = 10
    """Parts of the run that are told apart in the table."""
    seed: int = 0
    """Of all requests."""
    raw: bool = False
    """Send prompts as texts to go on with, not as chat messages; so it is with the tiny geometry anyhow."""
    prompt_words: int = 150
    """Most words that are put together for a prompt, besides a question or a shared beginning."""
    max_tokens: int = 256
    """Longest answer."""
    cancel: float = 0.1
    """Share of clients that leave before the end."""
    longest_s: float = 900.0
    """No request is sent after so long, whatever the steps."""
    timeout_s: float = 300.0
    """An answer that takes longer has failed."""

    def __post_init__(self) -> None:
        for name in ("steps", "concurrency", "windows", "prompt_words", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, the least is 1")

    @property
    def mix(self) -> Mix:
        """Of requests."""
        names = ("seed", "raw", "prompt_words", "max_tokens", "cancel")
        return Mix(**{name: getattr(self, name) for name in names})


class Soak:
    """One run against a server."""

    def __init__(self, url: str, options: SoakOptions) -> None:
        self._address: Address = parse_address(url)
        self._options = options
        self._numbers = itertools.count()
        self._times: deque[float] = deque([0.2], maxlen=_USUAL)
        self._num_failed = 0
        self._is_over = False
        self._is_drained = False
        self._readings: list[Reading] = []
        self._ended: list[Ended] = []

    async def run(self) -> Run:
        """Everything, up to an idle server with an empty cache. Raises RuntimeError if it does not begin to serve."""
        await self._await_all_up()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            await asyncio.gather(*(self._client() for _ in range(self._options.concurrency)))
            self._is_drained = True
        audit = await self._settled()
        self._readings += [reading] if (reading := await self._read()) else []
        await self._flush()
        return Run(
            wanted_steps=self._options.steps,
            ended=sorted(self._ended, key=lambda one: one.index),
            readings=self._readings,
            audit=audit,
            audit_flushed=await self._settled(),
            health=await self._health(),
        )

    async def _await_all_up(self) -> None:
        """The first reading, once every process serves, the drafter too."""
        for _ in range(round(_READY_S / _POLL_S)):
            if (reading := await self._read()) and not reading.down:
                self._readings.append(reading)
                return
            await asyncio.sleep(_POLL_S)
        raise RuntimeError(f"not all processes serve within {_READY_S:g} s")

    async def _client(self) -> None:
        """One request after the other, until it is over."""
        while not self._is_over:
            asked = plan(self._options.mix, next(self._numbers))
            usual_s = statistics.median(self._times)
            ended = await ask(asked, self._address, usual_s, self._options.timeout_s)
            self._ended.append(ended)
            if ended.outcome is Outcome.COMPLETED:
                self._times.append(ended.seconds)
            elif ended.outcome is Outcome.FAILED:
                self._num_failed += 1
                self._is_over = self._is_over or self._num_failed >= _MOST_FAILED

    async def _watch(self) -> None:
        """Read the counters to the end of the last request; say when there are enough, or no sense in going on."""
        first, silent = self._readings[0], 0
        while not self._is_drained:
            await asyncio.sleep(_POLL_S)
            reading = await self._read()
            silent = 0 if reading else silent + 1
            if reading:
                self._readings.append(reading)
            newest = self._readings[-1]
            is_late = perf_counter() - first.at_s > self._options.longest_s
            is_enough = newest.steps - first.steps >= self._options.steps
            self._is_over = self._is_over or is_enough or is_late or silent >= _MOST_FAILED

    async def _read(self) -> Reading | None:
        status, body = await self._get("/metrics")
        return read_metrics(body.decode("utf-8", "replace"), perf_counter()) if status == 200 else None

    async def _health(self) -> int:
        return (await self._get("/health"))[0]

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Status 0 if nobody answers."""
        try:
            async with asyncio.timeout(30.0):
                return await get(self._address, path)
        except (HttpError, TimeoutError):
            return 0, b""

    async def _settled(self) -> Check | None:
        """The memory service's audit, once nothing runs and no step can touch a page any more, or after a while."""
        service, deadline = Service(self._address, ""), perf_counter() + _SETTLE_S
        while audit := await service.settled_check(_SETTLE_S):
            if perf_counter() >= deadline or not any(pages.get("limbo") for pages in audit.pages.values()):
                break
            await asyncio.sleep(0.1)
        return audit

    async def _flush(self) -> None:
        """Empty the prefix cache, if the server is there."""
        request = request_bytes(self._address, "POST", "/flush_cache")
        with contextlib.suppress(HttpError, TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                exchange = await open_exchange(self._address, request)
                try:
                    await exchange.head()
                finally:
                    await exchange.close()


def server_flags(model: str, draft: str, folder: Path, more: Sequence[str]) -> list[str]:
    """Of `python -m launch`; what is made up goes into folder."""
    if model != _TINY:
        return find_model(model, draft).flags(more)
    target, drafter = LADDERS[_TINY].write(folder)
    return ServedModel(folder=target, draft=drafter).flags(["--load-format", "dummy", *more])


def soak(args: argparse.Namespace, options: SoakOptions) -> dict[str, Any]:
    """What goes into the JSON; the table is printed. Raises AssertionError if the server does not start."""
    stopped, run = "", None
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        flags = server_flags(args.model, args.draft, Path(folder), args.flags)
        served = Served(flags, ready_s=_READY_S, log=args.log)
        try:
            with served as server:
                run = uvloop.run(Soak(server.url, options).run())
        except AssertionError as error:
            if run is None:
                raise
            stopped = str(error).splitlines()[0]
    parts, checks = windows(run.readings, options.windows), check_all(run, served.lines, stopped)
    print(table(parts, checks))
    about = {
        "model": without_folders(args.model), "flags": without_folders(flags), "facts": facts(served.lines),
        "start_s": round(served.start_s, 1), **asdict(options),
    }  # fmt: skip
    return {
        "is_ok": all(check.is_ok for check in checks),
        "seconds": round(run.readings[-1].at_s - run.readings[0].at_s, 1), "requests": len(run.ended),
        "checks": [asdict(check) for check in checks], "windows": [asdict(part) for part in parts], "config": about,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a check fails, 2 if there was no run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=_TINY, help=f"{TARGET_HELP}; {_TINY} (the default) has random weights")
    parser.add_argument("--draft", default="", help=DRAFT_HELP)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--log", type=Path, metavar="FILE", help="what the server logs")
    parser.add_argument("flags", nargs="*", help="more flags of python -m launch, after --", metavar="FLAG")
    args, options = parse(parser, argv, SoakOptions)
    if args.model == _TINY:
        options = replace(options, raw=True)
    try:
        found = soak(args, options)
    except (AssertionError, RuntimeError, ValueError, OSError, ExceptionGroup) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["is_ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
