"""Steps on the device: put there without waiting, and read when the next one is under way."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memsvc.device.row_sampler import RowSampler
from memsvc.wire.base import PageId
from target_worker.cuda.order import Chunk, Order
from target_worker.cuda.state_book import StateBook
from target_worker.plan import StepPlan
from target_worker.req import FeatureRows, Phase, Req, state_reach

Wait = Callable[[Callable[[], bool]], None]
"""Returns once the function given to it says True."""


class Results(Protocol):
    """The tokens of a step, once it is over."""

    def read(self, wait: Wait) -> list[list[int]]:
        """One list for each member, then for each chunk that ends a prompt."""
        ...


class Writer(Protocol):
    """Changes slots, at the beginning of the next step."""

    def open(self, slot: int, sampler: RowSampler, *, length: int, anchor: int, valid_from: int) -> None:
        """A request takes the slot."""
        ...

    def close(self, slot: int) -> None:
        """Nobody is in it."""
        ...

    def set(self, slot: int, name: str, value: float) -> None:
        """A field of an open slot becomes value."""
        ...


class Work(Protocol):
    """See work.StepWork."""

    @property
    def writer(self) -> Writer:
        """Of the slots."""
        ...

    def first_row(self, num_members: int) -> int:
        """Exchange row where the features of chunks begin beside so many blocks."""
        ...

    def put(self, order: Order, hand_over: Callable[[], None]) -> Results:
        """Enqueue a step."""
        ...

    def catch_up(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Enqueue what brings states to the last page edge of these lengths."""
        ...

    def mark(self) -> Callable[[], bool]:
        """Says from now on whether all that is enqueued now is over."""
        ...


@dataclass(slots=True)
class Flight:
    """A step that was put on the device."""

    blocks: list[Req]
    """Those that decode in it."""
    chunks: dict[Req, int]
    ending: list[Req]
    """Of the chunks, those that complete their prompt."""
    num_drafts: int
    """k of its blocks."""
    drafted: Collection[Req]
    """Those for whom drafts have come; the blocks of others are plain."""
    is_whole: bool
    """No block lacks the drafts that were planned for it."""
    submitted_at: float = 0.0
    """By the clock of whoever submits it."""
    features: dict[Req, FeatureRows] = field(default_factory=dict)
    """Where the features of the chunks lie."""
    told: Collection[Req] | None = None
    """Those whose features the draft has been told of; None if it was told of none yet."""

    def reqs(self) -> list[Req]:
        """Everyone whose slot it moves, in the order of the results."""
        return [*self.blocks, *self.ending]


class DeviceExecutor:
    """Runs plans on a lane. The host waits for the device in `collect` and `fence` alone."""

    def __init__(self, work: Work, eos_ids: Collection[int], states: StateBook | None = None) -> None:
        """eos_ids: the model's. states: needed by a hybrid target."""
        self._work = work
        self._eos_ids = eos_ids
        self._states = states
        self._results: dict[int, Results] = {}
        """Of flights that are out, by identity."""
        self._ahead: dict[Req, int] = {}
        """Prompt tokens of flights that are out: computed_len does not have them yet."""
        self._marks: list[Callable[[], bool]] = []
        """Behind states that catch up."""

    def submit(
        self, plan: StepPlan, clear: Sequence[PageId], drafted: Collection[Req], hand_over: Callable[[], None]
    ) -> Flight:
        """Put the step on the lane, behind what is there. Slots and pages of everyone in it must be granted.

        clear: pages to zero first. drafted: those with drafts in their slots, for which the lane waits already.
        hand_over is called once, with the step on the lane. At most two flights may be out: collect the older one
        before a third.
        """
        flight = Flight(
            blocks=list(plan.decode),
            chunks=dict(plan.chunks),
            ending=self._ending(plan),
            num_drafts=plan.num_drafts if drafted else 0,
            drafted=drafted,
            is_whole=not plan.num_drafts or all(req in drafted for req in plan.decode),
        )
        for req in flight.ending:
            self._open(req)
        order = Order(clear=clear, members=[req.row for req in flight.blocks], chunks=self._chunks(flight))
        self._results[id(flight)] = self._work.put(order, hand_over)
        return flight

    def _ending(self, plan: StepPlan) -> list[Req]:
        return [req for req, num in plan.chunks.items() if num == req.extend_len - self._ahead.get(req, 0)]

    def _open(self, req: Req) -> None:
        """The slot stands at the prompt's last token, whose KV this step writes."""
        self._work.writer.open(
            req.row,
            req.sampler_of(self._eos_ids),
            length=len(req.tokens) - 1,
            anchor=req.tokens[-1],
            valid_from=req.draft.valid_from,
        )

    def _chunks(self, flight: Flight) -> list[Chunk]:
        ending = set(flight.ending)
        chunks, row = [], self._work.first_row(len(flight.blocks))
        for req, num in flight.chunks.items():
            ahead = self._ahead.get(req, 0)
            start = req.computed_len + ahead
            chunks.append(Chunk(req.row, start, req.tokens[start : start + num], req in ending))
            flight.features[req] = FeatureRows(start, num, row)
            self._ahead[req] = ahead + num
            row += num
        return chunks

    def collect(self, flight: Flight, wait: Wait) -> dict[Req, list[int]]:
        """Wait for a flight and take it in: the tokens of each request that still runs, whose lengths move on.

        A request that has ended since the submit is left out: what the device did for it counts for nothing.
        """
        results = list(zip(flight.reqs(), self._results.pop(id(flight)).read(wait), strict=True))
        for mark in self._marks:
            wait(mark)
        self._marks.clear()
        self._follow_states(flight, results)
        emitted = {req: tokens for req, tokens in results if req.phase is not Phase.FINISHED}
        for req, num in flight.chunks.items():
            self._ahead[req] -= num
            if not self._ahead[req]:
                del self._ahead[req]
            if req.phase is not Phase.FINISHED:
                req.computed_len += num
        for req, tokens in emitted.items():
            assert tokens, f"rid {req.rid} ran and got no token"
            if req not in flight.chunks:
                req.computed_len += len(tokens)
            for token in tokens:
                req.sampler_of(self._eos_ids).push(token)
        return emitted

    def _follow_states(self, flight: Flight, results: list[tuple[Req, list[int]]]) -> None:
        """Book where the flight has left the states, also those of requests that have ended since the submit."""
        if self._states is None:
            return
        for req, num in flight.chunks.items():
            self._states.reached(req, state_reach(req.computed_len + num, is_last=req in flight.ending))
        for req, tokens in results:
            # A block of a request that was done gives no tokens, and moves no state.
            if tokens and req not in flight.chunks:
                self._states.reached(req, req.computed_len)

    def catch_up(self, reqs: Iterable[Req]) -> list[Req]:
        """Have the states of these follow to the last page edge of what is computed; those that have to.

        None of them may have a block under way. It is over when the newest flight is collected, or after a fence.
        """
        behind = self._states.behind(reqs) if self._states is not None else []
        if behind and self._states is not None:
            self._work.catch_up([req.row for req in behind], [req.computed_len for req in behind])
            self._marks.append(self._work.mark())
            for req in behind:
                self._states.reached(req, req.computed_len)
        return behind

    def fence(self, wait: Wait) -> None:
        """Wait for all that is on the lane."""
        wait(self._work.mark())

    def close(self, slot: int) -> None:
        """Nobody is in the slot from the next submit on."""
        self._work.writer.close(slot)

    def restart_draft(self, req: Req) -> None:
        """The draft's context of req begins at what is computed now. No flight may be out."""
        if req.phase is Phase.DECODE:
            self._work.writer.set(req.row, "valid_from", req.draft.valid_from)
            self._work.writer.set(req.row, "num_rows", 0)
            self._work.writer.set(req.row, "num_drafts", 0)

    def stops(self, req: Req, token: int) -> bool:
        """token ends the answer of req."""
        return token in req.sampler_of(self._eos_ids).stop_ids
