"""Every request from Admit to its one terminal message, whatever the order in which steps are computed and read."""

import logging
import time
from abc import ABC, abstractmethod
from typing import Protocol

from memsvc.wire.base import FinishReason, ReqId
from memsvc.wire.mem import NoRoom, Stepped, TooLarge
from memsvc.wire.text import Abort, AbortAll, Admit
from target_worker.admission import WaitingList
from target_worker.config import TargetConfig
from target_worker.mem_link import MemLink
from target_worker.plan import Planner, StepPlan
from target_worker.req import Phase, Req
from target_worker.stats import Counters
from target_worker.text_link import TextLink

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
"""Longest sleep without work; leases are renewed and a returning draft is noticed at this pace."""
PRESSURE_POLL_S = 0.002
"""Pause before asking again when memory must come from limbo, quarantine or another engine."""
MAX_OPEN_TOKENS = 1 << 20
"""Tokens of requests opened by one Step, so that the message stays a quarter of what a link takes."""
BLOCKED_STEPS = 16
"""After a refused open, the next is tried this many steps later if nothing has closed until then."""


class Speculation(Protocol):
    """The draft, as far as requests are concerned."""

    @property
    def is_up(self) -> bool:
        """A draft answers."""
        ...

    def choose(self, num_reqs: int) -> int:
        """k of the next step, if so many requests decode in it."""
        ...

    def close(self, req: Req) -> None:
        """req holds no memory any more."""
        ...

    def observe_block(self, num_drafts: int, num_accepted: int) -> None:
        """A block was verified, and its request goes on."""
        ...

    def observe_step(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """The step of `plan`, whose blocks gave so many tokens, took so long."""
        ...


class Stops(Protocol):
    """Knows what ends an answer."""

    def stops(self, req: Req, token: int) -> bool:
        """token ends the answer of req."""
        ...


class RequestKeeper(ABC):
    """What both schedulers share: requests that come, wait, run and end, and their part of each Step message."""

    def __init__(
        self, config: TargetConfig, mem: MemLink, text: TextLink, drafting: Speculation, executor: Stops
    ) -> None:
        self._config = config
        self._mem = mem
        self._text = text
        self._speculation = drafting
        self._stops = executor
        self._planner = Planner(config, drafting.choose)
        self._waiting = WaitingList()
        self._running: dict[ReqId, Req] = {}
        """Requests that hold memory, in order of opening."""
        self._plan = StepPlan()
        self._arrivals = 0
        self._is_settled = True
        """memsvc has been told that the last step is over."""
        self._is_full = False
        """memsvc had no room for the last request it was asked to open."""
        self._num_closed = 0
        """Requests that the Step before closed."""
        self.counters = Counters()

    @property
    def is_idle(self) -> bool:
        """No request is known."""
        return not self._running and not self._waiting

    def _rest(self) -> None:
        """Nothing to do. The first time, a Step that says so lets the last pages out of limbo."""
        if self._is_settled:
            self._mem.renew()
        else:
            self._mem.begin([], [], [])
            self._finish()
            self._is_settled = True
        self._report()

    # Requests in

    def _take_in(self, timeout_s: float) -> None:
        for msg in self._text.receive(timeout_s):
            match msg:
                case Admit():
                    self._admit(msg)
                case Abort(rid):
                    self._abort(rid)
                case AbortAll():
                    for rid in [*self._running, *(req.rid for req in self._waiting)]:
                        self._abort(rid)
        self._text.flush()

    def _admit(self, msg: Admit) -> None:
        if msg.rid in self._running or self._waiting.holds(msg.rid):
            logger.warning("rid %d is known already, its second Admit is dropped", msg.rid)
            return
        try:
            req = Req.from_admit(msg, self._arrivals)
        except ValueError as error:
            self._text.fail(msg.rid, "bad_request", str(error))
            return
        self._arrivals += 1
        self.counters.prompt_tokens += req.prompt_len
        self._waiting.push(req)

    def _abort(self, rid: ReqId) -> None:
        req = self._waiting.remove(rid)
        if req is not None:
            req.finish = FinishReason.ABORT
            self._text.add(req, [])
            return
        req = self._running.get(rid)
        if req is not None and req.phase is not Phase.FINISHED:
            self._end(req, FinishReason.ABORT)
            self._plan.drop([req])
            req.draft.pending.clear()
            self._text.add(req, [])

    def _end(self, req: Req, reason: FinishReason) -> None:
        req.phase = Phase.FINISHED
        req.finish = reason

    # Memory

    def _slots(self, plan: StepPlan, following: StepPlan) -> list[tuple[Req, int]]:
        return [(req, self._planner.slots_needed(req, plan, following)) for req in following.reqs()]

    def _next_opens(self, num_closes: int) -> list[Req]:
        free = self._config.max_running_requests - self._mem.num_open
        came, self._num_closed = self._num_closed, num_closes
        if not self._is_full:
            return self._waiting.first(free, MAX_OPEN_TOKENS)
        # A refused open costs memsvc a search each time, so ask when something closes, in the step after that,
        # when its pages have left limbo, and now and then.
        if not (num_closes or came) and self._running and self.counters.num_steps % BLOCKED_STEPS:
            return []
        return self._waiting.first(min(free, 1 + num_closes + came), MAX_OPEN_TOKENS)

    def _closes(self) -> list[tuple[Req, str]]:
        # Features of the last rows go to the draft first, so that the next turn finds its context.
        ready = [req for req in self._finished() if not req.draft.pending or not self._speculation.is_up]
        return [(req, "abort" if req.finish is FinishReason.ABORT else "finish") for req in ready]

    def _finished(self) -> list[Req]:
        return [req for req in self._running.values() if req.phase is Phase.FINISHED]

    def _finish(self) -> Stepped:
        stepped = self._mem.finish()
        for req in self._mem.closed:
            self._forget(req)
        for req in self._mem.opened:
            self._running[req.rid] = req
            self.counters.cached_tokens += req.cached_tokens if req.num_retracts == 0 else 0
        for req, answer in self._mem.too_large(stepped):
            self._text.fail(req.rid, "too_large", _too_large_text(req, answer))
        for req in self._mem.not_opened(stepped):
            self._waiting.push(req)
        if stepped.open_no_room is not None or stepped.opened:
            self._is_full = stepped.open_no_room is not None
        return stepped

    def _forget(self, req: Req) -> None:
        self._running.pop(req.rid, None)
        self._speculation.close(req)
        req.row = 0

    @abstractmethod
    def _quiesce(self) -> None:
        """Nothing computes, and nothing waits to be written: a Step may be sent that releases pages."""

    def _follow(self, following: StepPlan, stepped: Stepped) -> None:
        """Make `following` the next plan: without those that memsvc wants back, and with slots for the rest."""
        self._retract([self._running[rid] for rid in stepped.retract if rid in self._running], following)
        self._make_room(following, stepped.no_room)
        following.drop(self._finished())
        self._plan = following

    def _make_room(self, following: StepPlan, no_room: NoRoom | None) -> None:
        """Ask again for the slots of `following`, giving up requests, until they are there or nobody is left."""
        if no_room is not None:
            self._quiesce()
        while no_room is not None and following:
            victims = [self._running[rid] for rid in no_room.victims if rid in self._running]
            self._take_in(0.0 if victims else PRESSURE_POLL_S)
            self._retract(victims, following)
            self._quiesce()
            following.drop(self._finished())
            self._mem.begin(self._slots(StepPlan(), following), [], self._closes())
            no_room = self._finish().no_room

    def _retract(self, victims: list[Req], following: StepPlan) -> None:
        """Give the memory of running requests back; they wait again, with everything they produced."""
        if not _unfinished(victims):
            return
        self._quiesce()
        # What was under way may have ended some of them.
        victims = _unfinished(victims)
        following.drop(victims)
        if not victims:
            return
        self._mem.begin([], [], [(req, "retract") for req in victims])
        self._finish()
        for req in victims:
            logger.info("retract rid=%d computed=%d tokens=%d", req.rid, req.computed_len, len(req.tokens))
            req.retract()
            self.counters.num_retracts += 1
            self._waiting.push(req)

    def _pause(self, plan: StepPlan) -> None:
        """Requests wait and memsvc has no room for the first of them: `plan`, the next one and the pool are empty."""
        if not plan and not self._plan and not self._running:
            time.sleep(PRESSURE_POLL_S)

    # Results

    def _book(self, req: Req, tokens: list[int], num_drafts: int) -> None:
        """Append what a forward gave. A request in PREFILL whose prompt is done starts to decode."""
        if num_drafts:
            self.counters.count_verify(req, num_drafts, len(tokens) - 1)
        req.tokens.extend(tokens)
        self.counters.generated_tokens += len(tokens)
        req.phase = Phase.DECODE
        if self._stops.stops(req, tokens[-1]):
            req.matched_stop = tokens[-1]
            self._end(req, FinishReason.STOP)
        elif req.num_left <= 0:
            self._end(req, FinishReason.LENGTH)
        elif num_drafts:
            self._speculation.observe_block(num_drafts, len(tokens) - 1)
        self._text.add(req, tokens)

    def _count(self, plan: StepPlan, num_tokens: int, seconds: float, *, is_typical: bool) -> None:
        if plan.decode:
            self.counters.count_step(plan.num_drafts, num_tokens, seconds)
            if is_typical:
                self._speculation.observe_step(plan, num_tokens, seconds)

    def _report(self) -> None:
        stats = self.counters.message(self._mem.num_open, len(self._waiting), draft_up=self._speculation.is_up)
        self._text.send_stats(stats, idle=self.is_idle)


def _unfinished(reqs: list[Req]) -> list[Req]:
    return [req for req in reqs if req.phase is not Phase.FINISHED]


def _too_large_text(req: Req, answer: TooLarge) -> str:
    return (
        f"the request needs {answer.frames_needed} frames of memory for {len(req.tokens)} tokens and up to "
        f"{req.num_left} more, the pool has {answer.frames_usable} (pages by kind: {answer.needs} needed, "
        f"{answer.usable} usable)"
    )
