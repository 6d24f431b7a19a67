"""A plain model of what workers do with pages: every slot remembers what was written to it.

The content of a slot is the whole prefix up to and with its token, so a page that was shared,
freed, evicted or remapped wrongly shows as a slot that holds another prefix, or garbage.
"""

from dataclasses import dataclass, field
from typing import Any

from memsvc.wire.mem import Opened, Stepped
from tests.support.mem_builders import PAGE_SIZE, Engine

Slot = tuple[int, int, int]
"""kind, page, offset"""


class Memory:
    """All slots of the arena. The kinds share the bytes of a frame, as in the real one."""

    def __init__(self, pages_per_frame: list[int]) -> None:
        self.per_frame = pages_per_frame
        self.slots: dict[Slot, Any] = {}
        self.frame_kind: dict[int, int] = {}
        self.stale: set[tuple[int, int]] = set()
        """Pages that may hold bytes of another kind."""

    def clear(self, kind: int, page: int) -> None:
        """Zero a page; if its frame was another kind's, that kind's bytes are lost."""
        per_frame = self.per_frame[kind]
        frame = page // per_frame
        if self.frame_kind.get(frame) != kind:
            self.slots = {slot: v for slot, v in self.slots.items() if slot[1] // self.per_frame[slot[0]] != frame}
            self.frame_kind[frame] = kind
            self.stale |= {(kind, other) for other in range(frame * per_frame, (frame + 1) * per_frame)}
        self.stale.discard((kind, page))
        for offset in range(PAGE_SIZE):
            self.slots[kind, page, offset] = None

    def write(self, kind: int, page: int, offset: int, value: Any) -> None:
        """Write one slot of a page that this kind owns."""
        frame = page // self.per_frame[kind]
        assert frame, f"kind {kind} page {page} does not exist"
        assert self.frame_kind.get(frame) == kind, f"kind {kind} page {page} is in a frame of another kind"
        assert (kind, page) not in self.stale, f"kind {kind} page {page} holds another kind's bytes"
        self.slots[kind, page, offset] = value

    def read(self, kind: int, page: int, offset: int) -> Any:
        """What is there, None if never written."""
        return self.slots.get((kind, page, offset))


@dataclass
class ModelReq:
    """A request as its engine knows it."""

    rid: int
    salt: str
    tokens: list[int]
    limit: int
    tables: list[list[int]]
    target_len: int
    draft_len: int
    valid_from: int
    draft_published: int
    released: int = 0
    flights: list["Flight"] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """Tokens it has places for."""
        return len(self.tables[0]) * PAGE_SIZE

    @property
    def draft_slots(self) -> int:
        """Tokens up to which the draft has pages, from draft_len on."""
        table = self.tables[1] if len(self.tables) > 1 else []
        holes = [i * PAGE_SIZE for i in range(self.draft_len // PAGE_SIZE, len(table)) if not table[i]]
        return min([*holes, len(table) * PAGE_SIZE])

    def prefix(self, position: int) -> tuple[int, ...]:
        """What the KV at this position stands for."""
        return tuple(self.tokens[: position + 1])


@dataclass
class Flight:
    """One forward of one request: it may read and write the pages of its tables until it is done."""

    step: int
    req: ModelReq
    tables: list[list[int]]


class Published:
    """Which prefixes were ever given to the tree, per namespace: the oracle for hits without eviction."""

    def __init__(self) -> None:
        self.target: set[tuple[str, str, tuple[int, ...]]] = set()
        self.draft: set[tuple[str, str, tuple[int, ...]]] = set()

    def hit(self, model: str, salt: str, tokens: list[int]) -> int:
        """Expected prefix_len."""
        pages = 0
        while (pages + 1) * PAGE_SIZE < len(tokens):
            if (model, salt, tuple(tokens[: (pages + 1) * PAGE_SIZE])) not in self.target:
                break
            pages += 1
        return pages * PAGE_SIZE

    def valid_from(self, model: str, salt: str, tokens: list[int], hit: int, window: int) -> int:
        """Expected draft_valid_from of a hit."""
        low = hit // PAGE_SIZE
        first = max(0, low - -(-window // PAGE_SIZE)) if window else 0
        while low > first and (model, salt, tuple(tokens[: low * PAGE_SIZE])) in self.draft:
            low -= 1
        return low * PAGE_SIZE


class ModelEngine(Engine):
    """An engine that follows every reply in plain lists and checks its memory after each step."""

    def setup(self, memory: Memory, published: Published, window: int) -> None:
        """Give it the memory it shares with others."""
        self.memory, self.published, self.window = memory, published, window
        self.reqs: dict[int, ModelReq] = {}
        self.flights: list[Flight] = []
        self.retract: list[int] = []
        self.lag = 0
        self.draft_on = True

    def apply(self, reply: Stepped) -> None:
        """Take over tables from a reply, then run the forward of this step and look at all memory."""
        for kind, page in zip(reply.clear_kinds, reply.clear_pages, strict=True):
            self.memory.clear(kind, page)
        for rid, kind, index, page in zip(
            reply.grow_rids, reply.grow_kinds, reply.grow_idxs, reply.grow_pages, strict=True
        ):
            table = self.reqs[rid].tables[kind]
            assert index == len(table), f"rid {rid} kind {kind}: grows at {index}, has {len(table)}"
            assert page
            table.append(page)
        for rid, kind, index, page in zip(
            reply.remap_rids, reply.remap_kinds, reply.remap_idxs, reply.remap_pages, strict=True
        ):
            table = self.reqs[rid].tables[kind]
            table += [0] * (index + 1 - len(table))
            table[index] = page
        self.retract = list(reply.retract)
        for req in self.reqs.values():
            tables = [list(table) for table in req.tables]
            self.flights.append(Flight(step=reply.num, req=req, tables=tables))
        self.scribble()
        self.verify()

    def opened(self, opened: Opened, tokens: list[int], limit: int, salt: str) -> ModelReq:
        """A request was admitted: its hit must hold what its prompt says."""
        assert opened.prefix_len % PAGE_SIZE == 0
        assert opened.prefix_len < len(tokens)
        assert opened.draft_valid_from <= opened.prefix_len
        req = ModelReq(
            rid=opened.rid,
            salt=salt,
            tokens=list(tokens),
            limit=limit,
            tables=[list(table) for table in opened.pages],
            target_len=opened.prefix_len,
            draft_len=opened.prefix_len,
            valid_from=opened.draft_valid_from,
            draft_published=opened.prefix_len // PAGE_SIZE,
            released=opened.draft_valid_from // PAGE_SIZE,
        )
        self.reqs[opened.rid] = req
        return req

    def commit_req(self, rid: int, target_len: int, draft_len: int, new_tokens: list[int]) -> None:
        """The step that is about to be sent makes these lengths final: the forward has written them."""
        req = self.reqs[rid]
        req.tokens += new_tokens
        for position in range(req.target_len, target_len):
            self._write(0, req.tables[0][position // PAGE_SIZE], position, req.prefix(position))
        if len(req.tables) > 1:
            for position in range(max(req.draft_len, req.valid_from), draft_len):
                self._write(1, req.tables[1][position // PAGE_SIZE], position, ("draft", *req.prefix(position)))
        req.target_len, req.draft_len = target_len, draft_len

    def published_by(self, rid: int) -> None:
        """After the step with the commit: what the tree must have now."""
        req = self.reqs[rid]
        for pages in range(1, req.target_len // PAGE_SIZE + 1):
            self.published.target.add((self.fingerprint, req.salt, tuple(req.tokens[: pages * PAGE_SIZE])))
        if len(req.tables) < 2:
            return
        full = min(req.draft_len, req.target_len) // PAGE_SIZE
        for page in range(req.draft_published, full):
            if page * PAGE_SIZE >= req.valid_from and page >= req.released and req.tables[1][page]:
                tokens = tuple(req.tokens[: (page + 1) * PAGE_SIZE])
                self.published.draft.add((self.fingerprint, req.salt, tokens))
        req.draft_published = max(req.draft_published, full)
        if self.window:
            req.released = max(req.released, req.target_len // PAGE_SIZE - -(-self.window // PAGE_SIZE))
            req.tables[1][: req.released] = [0] * min(req.released, len(req.tables[1]))

    def reset_req(self, rid: int) -> None:
        """The step about to be sent says that the draft lost this request."""
        req = self.reqs[rid]
        req.valid_from = req.draft_len = req.target_len

    def closed_req(self, rid: int) -> ModelReq:
        """The step about to be sent closes this request."""
        return self.reqs.pop(rid)

    def _write(self, kind: int, page: int, position: int, value: Any) -> None:
        if page:
            self.memory.write(kind, page, position % PAGE_SIZE, value)

    def scribble(self) -> None:
        """Forwards in flight write garbage past the committed lengths, also those of closed requests."""
        self.flights = [flight for flight in self.flights if flight.step > self.done]
        for flight in self.flights:
            req = flight.req
            for kind, committed in ((0, req.target_len), (1, req.draft_len)):
                if kind >= len(flight.tables):
                    continue
                for position in range(committed, len(flight.tables[kind]) * PAGE_SIZE):
                    self._write(kind, flight.tables[kind][position // PAGE_SIZE], position, "garbage")

    def verify(self) -> None:
        """Every committed slot that may still be read holds its prefix: in all tables, old ones in flight too."""
        for req in self.reqs.values():
            self._verify_tables(req, req.tables)
        for flight in self.flights:
            if flight.req.rid in self.reqs and self.reqs[flight.req.rid] is flight.req:
                self._verify_tables(flight.req, flight.tables[:1])

    def _verify_tables(self, req: ModelReq, tables: list[list[int]]) -> None:
        for position in range(min(req.target_len, len(tables[0]) * PAGE_SIZE)):
            found = self.memory.read(0, tables[0][position // PAGE_SIZE], position % PAGE_SIZE)
            assert found == req.prefix(position), f"rid {req.rid} position {position} holds {found}"
        if len(tables) < 2:
            return
        low = max(req.valid_from, req.target_len - self.window if self.window else 0)
        for position in range(low, req.draft_len):
            page = tables[1][position // PAGE_SIZE]
            if not page:
                continue
            found = self.memory.read(1, page, position % PAGE_SIZE)
            assert found == ("draft", *req.prefix(position)), f"rid {req.rid} draft position {position} holds {found}"
