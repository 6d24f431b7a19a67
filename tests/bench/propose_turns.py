"""Times of whole turns of a PlanWorker on a CUDA device, by route and number of requests.

In serving the draft's stream waits for the target's word while the host enqueues. Here it is kept busy for so long,
which hides the host of the paged route. Turns of the slow routes can't be enqueued ahead: materialized reads the device
on the host, and per_request has a launch for every kernel of every request, of many more than a stream holds. They begin
on an idle stream then, and all their time counts, the host's too; `hidden` says 0.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from draft_worker.config import DTYPE_BYTES, DraftConfig, kind_specs
from draft_worker.cuda.session import Session, SessionMaker
from draft_worker.cuda.worker import PlanWorker
from draft_worker.model import DraftModel
from draft_worker.shape import DraftShape
from draft_worker.weights import load_model
from draft_worker.worker import Memory
from memsvc.device.kv_pool import KvPool, KvShape
from memsvc.device.slots import SlotState
from memsvc.slot_layout import NOT_DONE, SlotLayout
from memsvc.wire.base import WIRE_VERSION, Epoch, PageId
from memsvc.wire.mem import KindLayout, Layout
from memsvc.wire.spec import DraftHello, DraftReady, ExchangeMap, Plan, Planned, SlotOpen
from tests.bench.propose_geometry import Geometry, floor_of
from tests.bench.target_turns import LEAD_US, Clock, DeviceClock, HostClock, Row

PAGE_SIZE = 16
ACCEPTED = 4
"""Rows of the newest verify that are written in each turn, of every request."""
SLOW_REPEATS = 3
WARM_UPS = 3
_MOST_LEAD_US = 300_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One geometry with blocks of one size."""

    name: str
    geometry: Geometry
    rows: int
    context: int
    concurrency: tuple[int, ...]
    dtype: str = "auto"
    device: str = "cuda"
    repeats: int = 20


class Bench:
    """A drafter of random weights over an arena of its own, and requests that never move on."""

    session_maker: type[SessionMaker] = SessionMaker

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        shape = job.geometry.write(folder, job.rows)
        self.config = DraftConfig(
            run_dir="", draft_path=str(folder / "drafter"), target_path=str(folder / "target"), device=job.device,
            load_format="dummy", dtype=job.dtype, context_len=job.context + 2 * PAGE_SIZE,
            max_running_requests=max(job.concurrency), cuda_graph_max_bs=max(job.concurrency),
        )  # fmt: skip
        self.shape: DraftShape = shape
        self.model: DraftModel = load_model(self.config, shape)
        self.clock: Clock = HostClock() if job.device == "cpu" else DeviceClock()
        self.num_slots = max(job.concurrency)
        self.slot_layout = SlotLayout(num_slots=self.num_slots, block_size=job.rows, vocab=shape.vocab_size)
        self._make_memory()

    def _make_memory(self) -> None:
        shape, dtype = self.shape, self.model.dtype
        (spec,) = kind_specs(shape, PAGE_SIZE, str(dtype).removeprefix("torch."))
        self.pages_per_req = -(-(self.job.context + PAGE_SIZE) // PAGE_SIZE)
        num_pages = 1 + self.num_slots * self.pages_per_req
        kind = KindLayout(spec.name, spec.page_bytes, PAGE_SIZE, 0, spec.window, 1, spec.page_bytes, num_pages)
        pool_bytes = num_pages * spec.page_bytes
        num_rows = self.num_slots * self.job.rows
        row_bytes = shape.feature_width * dtype.itemsize
        self.map = ExchangeMap(0, self.num_slots, self.slot_layout.num_bytes, num_rows)
        exchange_bytes = self.slot_layout.num_bytes + num_rows * row_bytes
        arena = torch.zeros(pool_bytes + exchange_bytes, dtype=torch.uint8, device=self.job.device)
        layout = Layout(
            arena_bytes=len(arena), frame_bytes=spec.page_bytes, num_frames=num_pages, page_size=PAGE_SIZE,
            kinds=[kind], exchange_offset=pool_bytes, exchange_bytes=exchange_bytes,
        )  # fmt: skip
        kv_shape = KvShape(
            num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=dtype
        )
        pool = KvPool(arena, kind, kv_shape)
        for layer in range(shape.num_layers):
            pool.k(layer).normal_()
            pool.v(layer).normal_()
        arena[pool_bytes + self.slot_layout.num_bytes :].view(dtype).normal_()
        self.slots = SlotState(self.slot_layout, arena[pool_bytes : pool_bytes + self.slot_layout.num_bytes])
        self._fill_slots()
        self.memory = Memory(arena=arena, layout=layout, pool=pool)

    def _fill_slots(self) -> None:
        slots, context = self.slots, self.job.context
        slots.reset()
        everyone = slice(1, self.num_slots + 1)
        numbers = torch.arange(self.num_slots, dtype=torch.int32, device=self.job.device)
        columns: dict[str, float | torch.Tensor] = {
            "length": context, "anchor": numbers + 100, "num_rows": min(ACCEPTED, self.job.rows), "done": NOT_DONE,
            "feature_row": numbers * self.job.rows, "feature_start": context - min(ACCEPTED, self.job.rows),
            "num_tokens": context + 1, "n_out": 1, "max_tokens": 1 << 20, "repetition_penalty": 1.0,
        }  # fmt: skip
        for name, value in columns.items():
            getattr(slots, name)[everyone] = value
        # float64 1.0, in two words.
        slots.top_p_high[everyone] = 0x3FF00000

    def worker(self, route: str, **changes: Any) -> "Turns":
        """A worker of one route that knows every request."""
        config = replace(self.config, propose_route=route, **changes)
        maker = self.session_maker(config, self.model, self.memory)
        return Turns(self, PlanWorker(config, self.model, self.memory, lambda _: None, maker))


@dataclass(frozen=True, slots=True)
class Timed:
    """One turn on a stream that was busy before it."""

    device_us: float
    host_us: float
    is_hidden: bool
    """All of it was enqueued before the stream got to it."""


class Turns:
    """The target's side of one worker."""

    def __init__(self, bench: Bench, worker: PlanWorker) -> None:
        self._bench = bench
        self._worker = worker
        dtype = str(bench.model.dtype).removeprefix("torch.")
        width = bench.shape.target_hidden_size
        reply = worker.handle(DraftHello(WIRE_VERSION, "main", Epoch(1), width, dtype, bench.map))
        assert isinstance(reply, DraftReady), reply
        self._number = reply.number
        # In no order, as pages come after a while.
        order = np.random.default_rng(0).permutation(np.arange(1, bench.num_slots * bench.pages_per_req + 1))
        self._pages = order.reshape(bench.num_slots, bench.pages_per_req).tolist()
        self._plan(opens=[SlotOpen(slot, pages) for slot, pages in enumerate(self._pages, start=1)])

    def _plan(self, **columns: Any) -> Planned:
        self._number += 1
        empty = Plan(self._number, 0, [], [], [], [], [], [], [], [], [], [], [], 0)
        reply = self._worker.handle(msgspec.structs.replace(empty, **columns))
        assert isinstance(reply, Planned), reply
        return reply

    def tokens(self, num_reqs: int) -> list[list[int]]:
        """Drafts of the first requests."""
        self._turn(num_reqs)
        self._worker.close()
        return self._bench.slots.drafts[1 : num_reqs + 1].tolist()

    def _turn(self, num_reqs: int) -> Planned:
        # A page that is named again, for every fourth request, as growth would have it.
        grown = range(1, num_reqs + 1, 4)
        first = [PageId(self._pages[slot - 1][0]) for slot in grown]
        return self._plan(
            members=list(range(1, num_reqs + 1)), num_drafts=self._bench.job.rows - 1,
            page_slots=list(grown), page_idxs=[0] * len(grown), page_ids=first,
        )  # fmt: skip

    @property
    def _session(self) -> Session:
        assert self._worker.session is not None
        return self._worker.session

    def _timed(self, num_reqs: int, lead_us: float) -> Timed:
        """One turn, over at return. The stream is busy for lead_us before it, and before events of the worker's own."""
        clock = self._bench.clock
        with self._session.lane.running():
            clock.spin(lead_us)
            before = clock.mark()
            reply = self._turn(num_reqs)
            is_hidden = not clock.is_over(before)
            after = clock.mark()
            clock.wait()
        return Timed(clock.us(before, after), reply.host_us, is_hidden)

    def _repeated(self, num_reqs: int, repeats: int) -> Iterator[Timed]:
        """So many turns after the warm-ups, which tell how long the stream has to be busy, and whether that hides any."""
        lead_us, hides = LEAD_US, False
        for _ in range(WARM_UPS):
            turn = self._timed(num_reqs, lead_us)
            lead_us, hides = min(_MOST_LEAD_US, 2 * turn.host_us + LEAD_US), hides or turn.is_hidden
        lead_us = lead_us if hides else 0.0
        for _ in range(repeats):
            yield self._timed(num_reqs, lead_us)

    def measure(self, num_reqs: int, repeats: int) -> Row:
        """Medians of whole turns: device_us from the hand-over wait to the hand-over word, host_us to enqueue it.

        hidden: in how many of them the host was done before the stream began; device_us is the device's alone there.
        """
        seen = list(self._repeated(num_reqs, repeats))
        return {
            "device_us": statistics.median(turn.device_us for turn in seen),
            "host_us": statistics.median(turn.host_us for turn in seen),
            "hidden": _hidden(seen),
        }

    def sections(self, num_reqs: int, repeats: int) -> Row:
        """Medians of sections' device times; the worker must trace. sections_hidden: as hidden of `measure`."""
        times = self._session.times
        assert times is not None
        seen: list[Timed] = []
        found: dict[str, list[float]] = {}
        for turn in self._repeated(num_reqs, repeats):
            seen.append(turn)
            times.collect()
            for name, us in times.newest.us.items():
                found.setdefault(f"{name}_us", []).append(us)
        return {name: statistics.median(us) for name, us in found.items()} | {"sections_hidden": _hidden(seen)}


def _hidden(turns: Sequence[Timed]) -> str:
    return f"{sum(turn.is_hidden for turn in turns)}/{len(turns)}"


def run_job(job: Job, routes: Sequence[str]) -> list[Row]:
    """One row for each route and number of requests. The first route's tokens are what others are compared with."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        bench = Bench(job, Path(folder))
        expected: dict[int, list[list[int]]] = {}
        rows = []
        for route in routes:
            turns = bench.worker(route)
            traced = bench.worker(route, spec_trace=2, disable_cuda_graph=route != "paged")
            repeats = job.repeats if route == "paged" else SLOW_REPEATS
            for num_reqs in job.concurrency:
                tokens = turns.tokens(num_reqs)
                wanted = expected.setdefault(num_reqs, tokens)
                times = turns.measure(num_reqs, repeats) | traced.sections(num_reqs, min(repeats, 5))
                rows.append(_row(bench, route, num_reqs, times) | {"tokens_equal": _share(tokens, wanted)})
    return rows


def _row(bench: Bench, route: str, num_reqs: int, times: Row) -> Row:
    job = bench.job
    floor = floor_of(bench.shape, num_reqs, job.context, DTYPE_BYTES[str(bench.model.dtype).removeprefix("torch.")])
    return {
        "route": route, "geometry": job.name, "rows_per_request": job.rows, "concurrency": num_reqs,
        "context": job.context, "floor_us": round(floor.us, 1), "ratio": round(times["device_us"] / floor.us, 3),
    } | {name: round(value, 1) if isinstance(value, float) else value for name, value in times.items()}  # fmt: skip


def _share(tokens: list[list[int]], wanted: list[list[int]]) -> float:
    """Of drafts that are the same."""
    pairs = [pair for row, other in zip(tokens, wanted, strict=True) for pair in zip(row, other, strict=True)]
    return round(sum(one == other for one, other in pairs) / len(pairs), 4)
