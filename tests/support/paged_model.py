"""A plain picture of what an engine's requests should find in the arena, byte for byte.

Every slot holds a digest of the request's salt and its tokens up to that slot, repeated over the slot's bytes. So a
page that was handed to two owners, came back too early, or was hit for the wrong prefix shows as wrong bytes.
"""

import hashlib
import mmap
from dataclasses import dataclass, field

from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import Layout, Stepped

Slot = tuple[int, PageId, int]
"""(kind, page, offset in tokens)."""


@dataclass
class ModelReq:
    """One open request. tables[kind] maps index to page."""

    rid: ReqId
    salt: str
    prompt_len: int
    tokens: list[int]
    tables: list[dict[int, PageId]]
    valid_from: int
    """The draft may read from here on."""
    target_len: int
    """Committed, as is draft_len."""
    draft_len: int
    computed_len: int
    """Rows written by all forwards submitted, as is written_len of the draft."""
    written_len: int
    num_known: int
    """Tokens the service knows."""
    running: list[tuple[int, int, int]] = field(default_factory=list)
    """Forwards that may still run: (step whose grants it uses, computed_len and written_len after it)."""
    final_len: int = 0
    """Rows of forwards that have ended, as is final_written of the draft."""
    final_written: int = 0

    def settle(self, done_step: int) -> None:
        """Forwards up to this step have ended."""
        while self.running and self.running[0][0] <= done_step:
            _, self.final_len, self.final_written = self.running.pop(0)

    def lose_draft(self) -> None:
        """The draft starts anew at what is final; no forward runs."""
        self.valid_from = self.written_len = self.final_written = self.final_len

    def digest(self, kind: int, position: int) -> bytes:
        """What the slot of a position holds."""
        text = f"{kind} {self.salt} {self.tokens[: position + 1]}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()


@dataclass
class ArenaModel:
    """The arena, and what must be found in it."""

    layout: Layout
    memory: mmap.mmap
    in_flight: list[tuple[int, dict[Slot, bytes]]] = field(default_factory=list)
    """(step, slots that the forward of that step's grants reads)."""

    def address(self, slot: Slot) -> tuple[int, int]:
        """[begin, end) of a slot in the arena."""
        kind, page, offset = slot
        layout = self.layout.kinds[kind]
        assert layout.pages_per_frame <= page < layout.num_pages, f"page {page} of kind {kind} does not exist"
        size = layout.page_bytes // layout.tokens_per_page
        begin = page * layout.stride_bytes + offset * size
        return begin, begin + size

    def slot(self, req: ModelReq, kind: int, position: int) -> Slot:
        """Where a position of a request stands."""
        index, offset = divmod(position, self.layout.page_size)
        page = req.tables[kind].get(index, 0)
        assert page, f"rid {req.rid} has no page {index} of kind {kind}, {position=}"
        return kind, page, offset

    def write(self, req: ModelReq, kind: int, begin: int, end: int) -> None:
        """Compute positions [begin, end)."""
        for position in range(begin, end):
            self._fill(self.slot(req, kind, position), req.digest(kind, position))

    def write_rejected(self, req: ModelReq, begin: int, end: int) -> None:
        """Drafts that were not accepted leave rubbish past the computed length, in every kind."""
        for kind in range(len(req.tables)):
            for position in range(begin, end):
                self._fill(self.slot(req, kind, position), b"rejected")

    def _fill(self, slot: Slot, value: bytes) -> None:
        begin, end = self.address(slot)
        self.memory[begin:end] = value * ((end - begin) // len(value))

    def readable(self, req: ModelReq, context_len: int) -> dict[Slot, bytes]:
        """What a forward after context_len reads: all of the target, the draft's valid part of the window before it."""
        found = {}
        for kind, layout in enumerate(self.layout.kinds):
            begin, end = 0, req.computed_len
            if kind:
                begin, end = req.valid_from, req.written_len
                begin = max(begin, context_len - layout.window) if layout.window else begin
            for position in range(begin, end):
                found[self.slot(req, kind, position)] = req.digest(kind, position)
        return found

    def check(self, slots: dict[Slot, bytes], who: str) -> None:
        """The arena holds these bytes."""
        for slot, value in slots.items():
            begin, end = self.address(slot)
            found = self.memory[begin:end]
            assert found == value * ((end - begin) // len(value)), f"{who}: {slot=} holds {found[:8]!r}, not {value!r}"

    def submit(self, step: int, req: ModelReq, context_len: int) -> None:
        """The forward of this step's grants reads the request's slots until done_step reaches it."""
        req.running.append((step, req.computed_len, req.written_len))
        self.in_flight.append((step, self.readable(req, context_len)))

    def done(self, step: int) -> None:
        """The forward of this step's grants, and all before it, have ended."""
        self.in_flight = [entry for entry in self.in_flight if entry[0] > step]


def apply_tables(reqs: dict[ReqId, ModelReq], stepped: Stepped) -> None:
    """Enter the grown and remapped pages of a reply into the tables of the requests that are still open."""
    for prefix in ("remap", "grow"):
        names = (f"{prefix}_{column}" for column in ("rids", "kinds", "idxs", "pages"))
        for rid, kind, index, page in zip(*(getattr(stepped, name) for name in names), strict=True):
            if rid in reqs:
                reqs[rid].tables[kind][index] = page  # 0 takes an entry back
