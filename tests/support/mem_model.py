"""A plain model of what workers do with pages: every slot remembers what was written to it.

The content of a slot is the whole prefix up to and with its token, so a page that was shared,
freed, evicted or remapped wrongly shows as a slot that holds another prefix, or garbage.
"""

from dataclasses import dataclass, field
from typing import Any

from memsvc.wire.base import ReqId
from memsvc.wire.mem import Freeze, Opened, Stepped
from tests.support.mem_builders import PAGE_SIZE, Engine
from tests.support.mem_memory import Memory, Published
from tests.support.mem_states import Page, StateOf


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
    state: StateOf = field(default_factory=StateOf)

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
    """One forward of one request: it may read and write the pages of its tables until it is done.

    writes: pages of its state and ring, none of which is frozen. reads: the state it goes on from.
    """

    step: int
    req: ModelReq
    tables: list[list[int]]
    writes: list[Page]
    reads: list[Page]
    reads_at: int


class ModelEngine(Engine):
    """An engine that follows every reply in plain lists and checks its memory after each step."""

    def setup(self, memory: Memory, published: Published, window: int) -> None:
        """Give it the memory it shares with others."""
        self.memory, self.published, self.window = memory, published, window
        self.reqs: dict[int, ModelReq] = {}
        self.flights: list[Flight] = []
        self.retract: list[int] = []
        kinds = self.manager.layout.kinds
        own = [kind for kind, layout in enumerate(kinds) if layout.name in self.kinds and not layout.tokens_per_page]
        self.states = [kind for kind in own if kinds[kind].is_state]
        self.rings = [kind for kind in own if not kinds[kind].is_state]
        self.freezing: list[tuple[ModelReq, list[Page]]] = []
        self.ended: list[ModelReq] = []
        """Closed by the step that is being sent."""
        self.peers: list[ModelEngine] = [self]
        """All engines of the pool."""

    def apply(self, reply: Stepped) -> None:
        """What a reply without opens asks for."""
        self.take(reply)
        self.launch(reply)

    def take(self, reply: Stepped) -> None:
        """Take over tables from a reply, before its opens."""
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
            assert kind not in self.rings
            table += [0] * (index + 1 - len(table))
            table[index] = page
        self._settle_freezes(reply)

    def launch(self, reply: Stepped) -> None:
        """Run the forward of this step and look at all memory."""
        self.retract = list(reply.retract)
        for req in self.reqs.values():
            self.flights.append(self._launch(req, reply.num))
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
        self._take_state(req, opened)
        return req

    def _take_state(self, req: ModelReq, opened: Opened) -> None:
        pages = [len(table) for table in opened.state_in]
        if not self.states or not opened.prefix_len:
            assert not any(pages)
            return
        assert pages == [len(opened.pages[k]) if k in self.states else 0 for k in range(len(opened.pages))]
        assert not any(set(state) & set(table) for state, table in zip(opened.state_in, opened.pages, strict=True))
        state = req.state
        state.at = state.from_at = state.reads_at = opened.prefix_len
        state.reads = [(kind, page) for kind in self.states for page in opened.state_in[kind]]
        state.held = tuple(req.tokens[: state.at])

    def _launch(self, req: ModelReq, step: int) -> Flight:
        state = req.state
        writes = [(kind, page) for kind in (*self.states, *self.rings) for page in req.tables[kind]]
        flight = Flight(step, req, [list(table) for table in req.tables], writes, list(state.reads), state.reads_at)
        state.launched()
        return flight

    def _settle_freezes(self, reply: Stepped) -> None:
        """What became of the states that this step froze."""
        moved = {(rid, kind) for rid, kind in zip(reply.remap_rids, reply.remap_kinds, strict=True)} & {
            (rid, kind) for rid in self.reqs for kind in self.states
        }
        for req, pages in self.freezing:
            prefix, space = tuple(req.tokens[: req.state.at]), (self.fingerprint, req.salt)
            is_open = self.reqs.get(req.rid) is req
            exchanged = {kind for kind in self.states if (req.rid, kind) in moved}
            moved -= {(req.rid, kind) for kind in exchanged}
            if not exchanged and (is_open or prefix in self.published.frozen.now.get(space, ())):
                continue
            if is_open:
                now = [(kind, page) for kind in self.states for page in req.tables[kind]]
                assert not set(now) & set(pages), f"rid {req.rid} is to write pages that are frozen"
            req.state.exchanged(pages, prefix, reply.num)
            # a step freezes before it closes
            holders = [(e, other) for e in self.peers for other in (*e.reqs.values(), *e.ended)]
            held = {p for e, other in holders for p in other.state.holds(e.done)}
            self.published.frozen.add(space, prefix, self.published.target, held)
        assert not moved, f"state pages moved without a freeze: {moved}"
        self.freezing, self.ended = [], []

    def commit_req(
        self, rid: int, target_len: int, draft_len: int, new_tokens: list[int], state_at: int | None = None
    ) -> None:
        """The step that is about to be sent makes these lengths final: the forward has written them.

        state_at: where its recurrent state stands, if that is not the last page edge. If it is no farther
        than before, the forward of this step brings it there.
        """
        req = self.reqs[rid]
        req.tokens += new_tokens
        for position in range(req.target_len, target_len):
            self._write(0, req.tables[0][position // PAGE_SIZE], position, req.prefix(position))
        if len(req.tables) > 1:
            for position in range(max(req.draft_len, req.valid_from), draft_len):
                self._write(1, req.tables[1][position // PAGE_SIZE], position, ("draft", *req.prefix(position)))
        req.target_len, req.draft_len = target_len, draft_len
        boundary = target_len // PAGE_SIZE * PAGE_SIZE
        if self.states and boundary > max(req.state.at, req.state.reads_at):
            req.state.advance(boundary, self.num + 1, boundary if state_at is None else state_at)

    def freeze_req(self, rid: int) -> None:
        """The step about to be sent freezes its state, which no forward in flight may write from now on."""
        req = self.reqs[rid]
        pages = [(kind, page) for kind in self.states for page in req.tables[kind]]
        for flight in self.flights:
            flight.writes = [page for page in flight.writes if page not in pages]
        for index, (kind, page) in enumerate(pages):
            self.memory.write(kind, page, 0, ("state", index, tuple(req.tokens[: req.state.at])))
        self.freezing.append((req, pages))

    def freeze_part(self, rids: list[int]) -> Freeze:
        """The part of a step that freezes the states of rids where they stand."""
        lens = [self.reqs[rid].state.at for rid in rids]
        for rid in rids:
            self.freeze_req(rid)
        return Freeze([ReqId(rid) for rid in rids], lens)

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
        req = self.reqs.pop(rid)
        self.ended.append(req)
        return req

    def _write(self, kind: int, page: int, position: int, value: Any) -> None:
        if page:
            self.memory.write(kind, page, position % PAGE_SIZE, value)

    def scribble(self) -> None:
        """Forwards in flight write garbage past the committed lengths, also those of closed requests."""
        self.flights = [flight for flight in self.flights if flight.step > self.done]
        for flight in self.flights:
            req = flight.req
            for kind, page in flight.writes:
                self.memory.write(kind, page, 0, "garbage")
            for kind, committed in ((0, req.target_len), (1, req.draft_len)):
                if kind >= len(flight.tables):
                    continue
                for position in range(committed, len(flight.tables[kind]) * PAGE_SIZE):
                    self._write(kind, flight.tables[kind][position // PAGE_SIZE], position, "garbage")

    def verify(self) -> None:
        """Every committed slot that may still be read holds its prefix: in all tables, old ones in flight too."""
        for req in self.reqs.values():
            self._verify_tables(req, req.tables)
            self._verify_state(req, req.state.reads, req.state.reads_at)
        for flight in self.flights:
            if flight.step > self.done and self.reqs.get(flight.req.rid) is flight.req:
                self._verify_tables(flight.req, flight.tables[:1])
                self._verify_state(flight.req, flight.reads, flight.reads_at)

    def _verify_state(self, req: ModelReq, reads: list[Page], at: int) -> None:
        """Frozen pages that may still be read hold the state at `at`."""
        for index, (kind, page) in enumerate(reads):
            found = self.memory.read(kind, page, 0)
            assert found == ("state", index, tuple(req.tokens[:at])), f"rid {req.rid}: state at {at} is {found}"

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
