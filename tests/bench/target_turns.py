"""Times of a target's steps: verifies of a bucket, whole and by section, and prompt chunks."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from target_worker.cuda.order import Chunk
from tests.bench.target_floors import bound, prompt_floor, verify_floor
from tests.bench.target_setup import Steps

Row = dict[str, Any]

WARM_UPS = 3
LEAD_US = 3000.0
"""The stream is kept busy for so long before the first verify, while the host gets ahead."""
_CYCLES_PER_US = 2000
"""Of a clock no faster than this, so that a spin is never shorter than asked."""
_MOST_LEAD_US = 300_000.0


class Clock(Protocol):
    """Points in time on the stream that is current."""

    def mark(self) -> Any:
        """The point when all enqueued so far has run."""
        ...

    def us(self, before: Any, after: Any) -> float:
        """Between two marks, both over."""
        ...

    def is_over(self, mark: Any) -> bool:
        """The device has passed it."""
        ...

    def spin(self, us: float) -> None:
        """Enqueue nothing useful that takes at least so long."""
        ...

    def wait(self) -> None:
        """Return when the device has nothing to do."""
        ...


class DeviceClock:
    """Events of a CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        """See Clock."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us(self, before: torch.cuda.Event, after: torch.cuda.Event) -> float:
        """See Clock."""
        return before.elapsed_time(after) * 1e3

    def is_over(self, mark: torch.cuda.Event) -> bool:
        """See Clock."""
        return mark.query()

    def spin(self, us: float) -> None:
        """See Clock."""
        torch.cuda._sleep(int(us * _CYCLES_PER_US))

    def wait(self) -> None:
        """See Clock."""
        torch.cuda.synchronize()


class HostClock:
    """Where everything has run when it is enqueued."""

    def mark(self) -> float:
        """See Clock."""
        return time.perf_counter()

    def us(self, before: float, after: float) -> float:
        """See Clock."""
        return (after - before) * 1e6

    def is_over(self, mark: float) -> bool:
        """See Clock. As if the stream were busy."""
        return False

    def spin(self, us: float) -> None:
        """See Clock."""

    def wait(self) -> None:
        """See Clock."""


def clock_of(steps: Steps) -> Clock:
    """The one that fits its device."""
    return DeviceClock() if steps.exchange.slots.words.is_cuda else HostClock()


def time_verify(steps: Steps, num_reqs: int, repeats: int) -> Row:
    """Medians of whole verifies, behind each other on a busy stream; every one begins at the job's context.

    steady: the last one left the features of the first, bit by bit.
    """
    clock, device_us, host_us = clock_of(steps), [], []
    features = steps.features(num_reqs * steps.setup.config.block_size)
    with steps.running:
        _warm(steps, num_reqs, clock)
        first = features.clone()
        clock.spin(LEAD_US)
        for _ in range(repeats):
            steps.reset()
            before, began = clock.mark(), time.perf_counter()
            steps.verify(num_reqs)
            host_us.append((time.perf_counter() - began) * 1e6)
            device_us.append((before, clock.mark()))
        clock.wait()
        steady = bool(torch.equal(first.view(torch.uint8), features.view(torch.uint8)))
        steps.reset()
    us = statistics.median(clock.us(*pair) for pair in device_us)
    return _rounded(device_us=us, host_us=statistics.median(host_us)) | {"steady": steady}


def time_sections(steps: Steps, num_reqs: int, repeats: int) -> Row:
    """Medians by section. steps: split, or the sections of a graph can't be told apart."""
    clock = clock_of(steps)
    seen: list[list[tuple[str, Any]]] = []
    with steps.running:
        _warm(steps, num_reqs, clock)
        clock.spin(LEAD_US)
        for _ in range(repeats):
            steps.reset()
            marks = [("", clock.mark())]
            steps.verify(num_reqs, lambda name, marks=marks: marks.append((name, clock.mark())))
            seen.append(marks)
        clock.wait()
        steps.reset()
    found: dict[str, list[float]] = {}
    for marks in seen:
        for (_, before), (name, after) in pairwise(marks):
            found.setdefault(f"{name}_us", []).append(clock.us(before, after))
    return _rounded(**{name: statistics.median(us) for name, us in found.items()})


def _warm(steps: Steps, num_reqs: int, clock: Clock) -> None:
    steps.choose(num_reqs)
    for _ in range(WARM_UPS):
        steps.reset()
        steps.verify(num_reqs)
    clock.wait()


def verify_row(steps: Steps, split: Steps, num_reqs: int, repeats: int) -> Row:
    """All figures of one number of requests."""
    setup = steps.setup
    size, context = setup.config.block_size, setup.job.context
    floor = verify_floor(setup.shape, num_reqs, size, context, setup.item_bytes)
    times = time_verify(steps, num_reqs, repeats) | time_sections(split, num_reqs, -(-repeats // 2))
    return {
        "step": "verify", "concurrency": num_reqs, "rows": num_reqs * size, "context": context,
        "floor_us": round(floor.us, 1), "bound": bound(floor),
        "ratio": round(times["device_us"] / floor.us, 3), "limit": _limit(times),
    } | times  # fmt: skip


@dataclass(frozen=True, slots=True)
class PromptForm:
    """A step of prompts, of which each has a slot and ends."""

    lens: list[int]
    start: int = 0
    """Tokens of each that are there already."""
    by_graph: bool = False

    @property
    def facts(self) -> Row:
        """Which of all it is."""
        return {"prompts": self.lens, "start": self.start, "route": "graph" if self.by_graph else "eager"}

    @classmethod
    def of_row(cls, row: Row) -> "PromptForm":
        """The one that a row is of."""
        return cls(row["prompts"], row["start"], row["route"] == "graph")

    def chunks(self, steps: Steps) -> list[Chunk]:
        """Of the tokens of the first slots."""
        tokens = steps.setup.tokens
        return [
            Chunk(slot, self.start, tokens[slot][self.start : self.start + num], True)
            for slot, num in enumerate(self.lens, start=1)
        ]

    def putter(self, steps: Steps) -> Callable[[], Any]:
        """Enqueues it."""
        chunks = self.chunks(steps)
        return partial(steps.prompts_by_graph if self.by_graph else steps.prompts, chunks)


def time_prompts(steps: Steps, put: Callable[[], Any], repeats: int) -> Row:
    """Medians of prompt steps, which put enqueues.

    device_us: on a stream that was busy until the host had enqueued everything, as often as `hidden` says.
    alone_us: on a stream that had nothing to do, so it is what the host takes where that is longer.
    host_us: until the call returns, the less of both. Behind a busy stream a call of more than about a thousand launches
    waits until the stream takes more, so it is never hidden; on an idle one it waits where the device is so far behind.
    """
    clock = clock_of(steps)
    device_us, host_us, alone_us, hidden = [], [], [], 0

    def run() -> tuple[Any, Any, float, bool]:
        before, began = clock.mark(), time.perf_counter()
        put()
        took = (time.perf_counter() - began) * 1e6
        is_hidden = not clock.is_over(before)
        after = clock.mark()
        clock.wait()
        return before, after, took, is_hidden

    with steps.running:
        lead_us = min(_MOST_LEAD_US, 2 * min(run()[2] for _ in range(WARM_UPS)) + LEAD_US)
        for _ in range(repeats):
            before, after, took_alone, _ = run()
            alone_us.append(clock.us(before, after))
            clock.spin(lead_us)
            before, after, took, is_hidden = run()
            device_us.append(clock.us(before, after))
            host_us.append(min(took, took_alone))
            hidden += is_hidden
            lead_us = lead_us if is_hidden else min(_MOST_LEAD_US, 2 * lead_us)
    medians = {"device_us": device_us, "host_us": host_us, "alone_us": alone_us}
    return _rounded(**{name: statistics.median(us) for name, us in medians.items()}) | {"hidden": f"{hidden}/{repeats}"}


def prompt_row(steps: Steps, form: PromptForm, repeats: int) -> Row:
    """All figures of a step of prompts. The floor knows nothing of tokens before them."""
    floor = prompt_floor(steps.setup.shape, form.lens, steps.setup.item_bytes)
    times = time_prompts(steps, form.putter(steps), repeats)
    return {
        "step": "prefill", "tokens": sum(form.lens), **form.facts, "floor_us": round(floor.us, 1),
        "bound": bound(floor), "ratio": round(times["device_us"] / floor.us, 3), "limit": _limit(times),
    } | times  # fmt: skip


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error; NaN if either has one."""
    return float(((got.double() - want.double()).norm() / want.double().norm()).item())


def _limit(times: Row) -> str:
    """Whose time a step behind the other takes: the device's, or the host's to enqueue it."""
    return "host" if times["host_us"] > times["device_us"] else "device"


def _rounded(**us: float) -> Row:
    return {name: round(value, 1) for name, value in us.items()}
