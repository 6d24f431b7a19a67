"""The step loop: take in, ask for memory, draft, forward, verify, hand out."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from memsvc.wire.base import FinishReason, ReqId
from memsvc.wire.mem import NoRoom, Stepped, TooLarge
from memsvc.wire.text import Abort, AbortAll, Admit
from target_worker.admission import WaitingList
from target_worker.config import TargetConfig
from target_worker.drafting import Drafting
from target_worker.executor import Executor
from target_worker.mem_link import MemLink
from target_worker.plan import Planner, StepPlan
from target_worker.req import Phase, Req
from target_worker.spec_link import SpecLink
from target_worker.stats import Counters
from target_worker.text_link import TextLink
from target_worker.trace import StepTrace
from target_worker.width import Width, make_width

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
"""Longest sleep without work; leases are renewed and a returning draft is noticed at this pace."""
MAX_OPEN_TOKENS = 1 << 20
"""Tokens of requests opened by one Step, so that the message stays a quarter of what a link takes."""
BLOCKED_STEPS = 16
"""After a refused open, the next is tried this many steps later if nothing has closed until then."""
PRESSURE_POLL_S = 0.002
"""Pause before asking again when memory must come from limbo, quarantine or another engine."""


@dataclass(frozen=True, slots=True)
class Links:
    """The scheduler's neighbours. spec is None without speculation."""

    mem: MemLink
    text: TextLink
    spec: SpecLink | None


class Scheduler:
    """Owns every request from Admit to its one terminal message.

    One call of `step` is one forward. The Step message for the forward after it is on its way while
    this one computes, so slots are asked for one step ahead.
    """

    def __init__(
        self,
        config: TargetConfig,
        links: Links,
        executor: Executor,
        width: Width | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """width: chooses k for each step; None makes what config asks for. clock: seconds, for what steps cost."""
        self._config = config
        self._mem = links.mem
        self._text = links.text
        self._drafting = Drafting(config, links.spec, links.mem, width or make_width(config))
        self._clock = clock
        self._executor = executor
        self._planner = Planner(config, self._drafting.choose)
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
        self._trace = StepTrace(config.spec_trace)
        self.counters = Counters()

    @property
    def is_idle(self) -> bool:
        """No request is known."""
        return not self._running and not self._waiting

    def step(self) -> None:
        """One round. Sleeps in the inbox while there is nothing to do."""
        self._take_in(IDLE_POLL_S if self.is_idle and self._is_settled else 0.0)
        self._drafting.poll(self._running.values())
        if self.is_idle:
            self._rest()
            return
        started = self._clock()
        self._is_settled = False
        plan, following = self._plan, self._planner.after(self._plan, self._running.values())
        closes = self._closes()
        self._mem.begin(self._slots(plan, following), self._next_opens(len(closes)), closes)
        num_tokens = self._compute(plan)
        stepped = self._finish()
        self._retract([self._running[rid] for rid in stepped.retract if rid in self._running], following)
        self._make_room(following, stepped.no_room)
        following.drop(self._finished())
        self._plan = following
        self._count(plan, num_tokens, self._clock() - started, is_typical=stepped.no_room is None)
        self._report()
        if not plan and not following and not self._running:
            time.sleep(PRESSURE_POLL_S)  # requests wait and memsvc has no room for the first of them

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
        ready = [req for req in self._finished() if not req.draft.pending or not self._drafting.is_up]
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
        self._drafting.close(req)

    def _make_room(self, following: StepPlan, no_room: NoRoom | None) -> None:
        """Ask again for the slots of `following`, giving up requests, until they are there or nobody is left."""
        if no_room is not None:
            # Every Step from here on releases draft pages, so nothing may wait to be written into one.
            self._flush_features()
        while no_room is not None and following:
            victims = [self._running[rid] for rid in no_room.victims if rid in self._running]
            self._take_in(0.0 if victims else PRESSURE_POLL_S)
            self._retract(victims, following)
            self._flush_features()
            following.drop(self._finished())
            self._mem.begin(self._slots(StepPlan(), following), [], self._closes())
            no_room = self._finish().no_room

    def _retract(self, victims: list[Req], following: StepPlan) -> None:
        """Give the memory of running requests back; they wait again, with everything they produced."""
        victims = [req for req in victims if req.phase is not Phase.FINISHED]
        if not victims:
            return
        self._flush_features()
        following.drop(victims)
        self._mem.begin([], [], [(req, "retract") for req in victims])
        self._finish()
        for req in victims:
            logger.info("retract rid=%d computed=%d tokens=%d", req.rid, req.computed_len, len(req.tokens))
            req.retract()
            self.counters.num_retracts += 1
            self._waiting.push(req)

    def _flush_features(self) -> None:
        self._drafting.flush(self._running.values())

    # Compute

    def _compute(self, plan: StepPlan) -> int:
        """Tokens that the blocks gave."""
        self._trace.start(plan)
        drafts = self._drafting.drafts(plan, self._running.values())
        self._trace.mark("draft")
        if not plan:
            return 0
        self.counters.num_steps += 1
        emitted = self._executor.run(plan, drafts, self._mem.take_clear_target(), self._trace)
        for req, tokens in emitted.items():
            self._book(req, tokens, drafts.get(req.rid, []))
        self._text.flush()
        self._trace.end(self._drafting.last)
        return sum(len(emitted[req]) for req in plan.decode)

    def _book(self, req: Req, tokens: list[int], drafts: list[int]) -> None:
        """Append what a forward gave. A request in PREFILL whose prompt is done starts to decode."""
        if drafts:
            self.counters.count_verify(req, len(drafts), len(tokens) - 1)
        req.tokens.extend(tokens)
        self.counters.generated_tokens += len(tokens)
        req.phase = Phase.DECODE
        if self._executor.stops(req, tokens[-1]):
            req.matched_stop = tokens[-1]
            self._end(req, FinishReason.STOP)
        elif req.num_left <= 0:
            self._end(req, FinishReason.LENGTH)
        elif drafts:
            self._drafting.observe_block(len(drafts), len(tokens) - 1)
        self._text.add(req, tokens)

    def _count(self, plan: StepPlan, num_tokens: int, seconds: float, *, is_typical: bool) -> None:
        if plan.decode:
            self.counters.count_step(plan.num_drafts, num_tokens, seconds)
            if is_typical:
                self._drafting.observe_step(plan, num_tokens, seconds)

    def _report(self) -> None:
        stats = self.counters.message(self._mem.num_open, len(self._waiting), draft_up=self._drafting.is_up)
        self._text.send_stats(stats, idle=self.is_idle)


def _too_large_text(req: Req, answer: TooLarge) -> str:
    return (
        f"the request needs {answer.frames_needed} frames of memory for {len(req.tokens)} tokens and up to "
        f"{req.num_left} more, the pool has {answer.frames_usable} (pages by kind: {answer.needs} needed, "
        f"{answer.usable} usable)"
    )
