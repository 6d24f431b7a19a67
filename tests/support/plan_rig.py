"""A PlanWorker over a small arena, on the CPU (kernels interpreted) or on CUDA, and the target's side of it by hand."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from draft_worker.cuda.session import Session, SessionMaker
from draft_worker.cuda.worker import PlanWorker
from draft_worker.weights import load_model
from draft_worker.worker import Memory
from memsvc.device.kv_pool import KvPool
from memsvc.device.lane import Lane, Words
from memsvc.device.slots import SlotState, SlotWriter
from memsvc.slot_layout import SlotLayout
from memsvc.wire.base import WIRE_VERSION, Epoch, PageId, ReqId
from memsvc.wire.mem import Layout
from memsvc.wire.spec import DraftHello, ExchangeMap, Plan, Planned, SlotOpen
from memsvc.wire.text import Sampling
from tests.support.draft_rig import EXCHANGE_ROWS, GREEDY, NUM_PAGES, PAGE_SIZE, PAGES_PER_FRAME, DraftRig

NUM_SLOTS = 8
EMPTY = Plan(1, 0, [], [], [], [], [], [], [], [], [], [], [], 0)


class HostLane:
    """A Lane in which everything has run when it is enqueued. A word that is not there yet is the test's mistake."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self.waits: list[int] = []
        self.patience: list[float] = []

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stage(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.copy())

    def stage_into(self, out: torch.Tensor, values: np.ndarray) -> None:
        out.copy_(torch.from_numpy(values))

    def await_peer(self, value: int) -> None:
        assert int(self._words.peer) >= value, f"would wait for {value}, the word is {int(self._words.peer)}"
        self.waits.append(value)

    def post(self, value: int) -> None:
        self._words.own.fill_(value)

    def drain(self, patience_s: float) -> None:
        self.patience.append(patience_s)

    def words(self) -> tuple[int, int]:
        return int(self._words.own), int(self._words.peer)


class HostSessions(SessionMaker):
    """Sessions whose work is done when it is enqueued."""

    def lane(self, words: Words) -> Lane:
        return HostLane(words)


class PlanRig:
    """Requests live in a DraftRig, which answers what is expected; a request's slot is its row there."""

    def __init__(
        self, folder: Path, version: int, device: str, *, changes: dict[str, Any] | None = None, **overrides: Any
    ):
        """changes: of the draft's config. overrides: of the drafter's."""
        self.cpu = DraftRig(folder, version, **overrides)
        self.device = device
        shape = self.cpu.shape
        config = replace(
            self.cpu.config,
            device=device,
            context_len=40 * PAGE_SIZE - shape.block_size,
            max_running_requests=NUM_SLOTS,
            **(changes or {}),
        )
        model = self.cpu.model if device == "cpu" else load_model(config, shape)
        self.block_size = 1 + config.drafts_per_block(shape)
        self.layout = SlotLayout(num_slots=NUM_SLOTS, block_size=self.block_size, vocab=shape.vocab_size)
        kind = self.cpu.pool.kind
        exchange_at = kind.num_pages * kind.stride_bytes
        row_bytes = shape.feature_width * 4
        self.map = ExchangeMap(0, NUM_SLOTS, self.layout.num_bytes, EXCHANGE_ROWS)
        exchange_bytes = self.layout.num_bytes + EXCHANGE_ROWS * row_bytes
        self.arena = torch.full((exchange_at + exchange_bytes,), 0xFF, dtype=torch.uint8, device=device)
        self.exchange = self.arena[exchange_at:]
        self.slots = SlotState(self.layout, self.exchange[: self.layout.num_bytes])
        self.slots.reset()
        self.features = self.exchange[self.layout.num_bytes :].view(torch.float32).view(EXCHANGE_ROWS, -1)
        memory_layout = Layout(
            arena_bytes=len(self.arena), frame_bytes=kind.stride_bytes * PAGES_PER_FRAME,
            num_frames=NUM_PAGES // PAGES_PER_FRAME, page_size=PAGE_SIZE, kinds=[kind],
            exchange_offset=exchange_at, exchange_bytes=exchange_bytes,
        )  # fmt: skip
        self.pool = KvPool(self.arena, kind, self.cpu.pool.shape)
        self.acks: list[Epoch] = []
        memory = Memory(arena=self.arena, layout=memory_layout, pool=self.pool)
        maker = HostSessions(config, model, memory) if device == "cpu" else None
        self.worker = PlanWorker(config, model, memory, self.acks.append, maker)
        self.writer = SlotWriter(self.slots)
        self.number = 0
        self._row = 0

    @property
    def session(self) -> Session:
        """The worker's."""
        assert self.worker.session is not None
        return self.worker.session

    def hello(self, epoch: int = 1, **changes: Any) -> Any:
        """The reply to a greeting."""
        width = self.cpu.shape.target_hidden_size
        msg = DraftHello(WIRE_VERSION, "main", Epoch(epoch), width, "float32", self.map)
        reply = self.worker.handle(msgspec.structs.replace(msg, **changes))
        self.number = getattr(reply, "number", self.number)
        return reply

    def slot(self, rid: int) -> int:
        """Of an open request."""
        return self.cpu.tables.row(ReqId(rid))

    def open(self, rid: int, context_len: int, valid_from: int = 0, sampling: Sampling = GREEDY) -> dict[str, Any]:
        """Opens rid here, and returns the columns of a Plan that tells the draft of it and of its features."""
        self.cpu.open(rid, context_len, valid_from)
        slot, sampler = self.slot(rid), self.cpu.sampler(rid, sampling)
        self.writer.open(slot, sampler, length=context_len, anchor=self.cpu.tokens[rid][-1], valid_from=valid_from)
        self.writer.flush(lambda values: torch.from_numpy(values.copy()).to(self.device))
        pages = [PageId(page) for page in self.cpu.tables.table[slot].tolist()]
        row, num = self.put(rid, valid_from, context_len), context_len - valid_from
        return {
            "opens": [SlotOpen(slot, pages)],
            "write_slots": [slot], "write_starts": [valid_from], "write_lens": [num], "write_rows": [row],
        }  # fmt: skip

    def put(self, rid: int, start: int, end: int) -> int:
        """Features of tokens [start, end) into the exchange; the first row."""
        row = self._row if self._row + end - start <= EXCHANGE_ROWS else 0
        self._row = row + end - start
        for index, position in enumerate(range(start, end)):
            self.features[row + index] = self.cpu.features[rid][position].to(self.device)
        return row

    def emit(self, rid: int, num: int) -> None:
        """What a verify that gives out num tokens leaves on the device, and in the rig that answers."""
        tokens, slot = self.cpu.tokens[rid], self.slot(rid)
        start = len(tokens) - 1
        self.cpu.write({rid: (start, num)})
        row = self.put(rid, start, start + num)
        tokens.extend(self.cpu.rng.integers(0, self.cpu.shape.vocab_size, num).tolist())
        for name, value in {
            "length": start + num, "anchor": tokens[-1], "num_rows": num, "feature_row": row, "feature_start": start,
            "num_drafts": 0, "n_out": len(tokens) - 3, "num_tokens": len(tokens),
        }.items():  # fmt: skip
            getattr(self.slots, name)[slot] = value

    def plan(self, rids: Sequence[int], num_drafts: int = 0, **columns: Any) -> Any:
        """The reply to the next Plan."""
        self.number += 1
        if self.device == "cuda":
            # The rig writes features and slots on another stream than the worker's.
            torch.cuda.synchronize()
        msg = msgspec.structs.replace(
            EMPTY, number=self.number, members=[self.slot(rid) for rid in rids], num_drafts=num_drafts, **columns
        )
        return self.worker.handle(msg)

    def drafts(self, rids: Sequence[int], num_drafts: int, **columns: Any) -> list[list[int]]:
        """What a Plan leaves in the slots, as many as count there."""
        reply = self.plan(rids, num_drafts, **columns)
        assert isinstance(reply, Planned), reply
        self.session.lane.drain(0.0)
        rows = [self.slot(rid) for rid in rids]
        counted = self.slots.num_drafts[rows].tolist()
        return [drafts[:num] for drafts, num in zip(self.slots.drafts[rows].tolist(), counted, strict=True)]


def merged(*columns: dict[str, Any]) -> dict[str, Any]:
    """The columns of several opens, one after another."""
    names = dict.fromkeys(name for part in columns for name in part)
    return {name: [entry for part in columns for entry in part.get(name, [])] for name in names}
