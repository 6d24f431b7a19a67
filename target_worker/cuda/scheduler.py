"""The step loop on a device: a step is put there before the one ahead of it is read, and never waited for twice.

Of one round: submit step n; read n - 1, which runs until then; plan n + 1 and ask for its memory while n runs; tell the
draft what follows n. So the Step message, the draft's turn and the answers of n - 1 are hidden behind step n.

A Step may release what the one before it freed, since every kernel that could use that was read by now: step n was put
on the device after the reply to the Step before. Steps out of this order are only sent when nothing is under way
(`_drain`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from target_worker.config import TargetConfig
from target_worker.cuda.executor import DeviceExecutor, Flight
from target_worker.cuda.plan_drafting import PlanDrafting
from target_worker.keeper import IDLE_POLL_S, RequestKeeper
from target_worker.mem_link import MemLink
from target_worker.plan import StepPlan
from target_worker.req import Phase, Req
from target_worker.text_link import TextLink

LOOK_S = 20e-6
"""Pause between two looks at whether a step is over."""
CHECK_S = 0.001
"""How often the draft is looked for meanwhile: without it the step would wait for ever."""
HANG_S = 60.0
"""A step takes less. If one does not end, the draft is killed, and after as long again this process gives up."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What the scheduler talks to."""

    mem: MemLink
    text: TextLink
    drafting: PlanDrafting


class PipelinedScheduler(RequestKeeper):
    """One call of `step` puts one step on the device and reads the one before."""

    def __init__(
        self,
        config: TargetConfig,
        neighbours: Neighbours,
        executor: DeviceExecutor,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """clock: seconds, for what steps cost. A step costs the time from the end of the one before to its own."""
        super().__init__(config, neighbours.mem, neighbours.text, neighbours.drafting, executor)
        self._drafting = neighbours.drafting
        self._executor = executor
        self._clock = clock
        self._flight: Flight | None = None
        """The newest step, which is not read yet."""
        self._read_at = 0.0
        self.on_wait: Callable[[], None] | None = None
        """Called now and then while a step is waited for."""

    def step(self) -> None:
        """One round. Sleeps in the inbox while there is nothing to do."""
        is_quiet = self.is_idle and self._flight is None
        self._take_in(IDLE_POLL_S if is_quiet and self._is_settled else 0.0)
        self._tend_draft()
        if self.is_idle and self._flight is None:
            if not self._is_settled:
                self._settle()
            self._rest()
            return
        self._is_settled = False
        plan, before = self._plan, self._flight
        self._flight = self._submit(plan) if plan else None
        if before is not None:
            self._collect(before)
        if self._flight is None:
            self._settle()
        following = self._planner.after(plan, self._running.values())
        following.drop(self._finished())
        closes = self._closes()
        self._mem.begin(self._slots(plan, following), self._next_opens(len(closes)), closes)
        stepped = self._finish()
        self._follow(following, stepped)
        self._drafting.send(self._flight, self._running.values(), following)
        self._report()
        self._pause(plan)

    # States

    def catch_up(self, reqs: list[Req]) -> None:
        """Bring states to the last page edge of what is computed, and wait for it: memsvc is told next."""
        blocks = set(self._flight.blocks) if self._flight is not None else set()
        # A block that is under way does it itself, and its rows are in the ring by then.
        moving = {req for req in reqs if req in blocks and req.phase is Phase.DECODE}
        if self._executor.catch_up([req for req in reqs if req not in moving]) or moving:
            self._executor.fence(self._wait)

    def _closes(self) -> list[tuple[Req, str]]:
        """A request whose state is not where it will be frozen goes a round later, so that no step is waited for."""
        closes = super()._closes()
        if self._flight is None:
            return closes
        # Also of those that may not go yet, as long as the state that they stand on is held: until the Step after the
        # one that told of a page past it.
        late = self._executor.catch_up([req for req in self._finished() if self._mem.may_catch_up(req)])
        return [(req, reason) for req, reason in closes if req not in late]

    def _forget(self, req: Req) -> None:
        self._executor.close(req.row)
        super()._forget(req)

    # The draft

    def _tend_draft(self) -> None:
        """Notice a draft that has come up, and requests whose last missing draft page has come."""
        is_new = self._drafting.poll(self._running.values())
        reqs = list(self._running.values()) if is_new else [*self._mem.healed]
        if not reqs:
            return
        # This sends a Step of its own, and each releases draft pages.
        self._drain(is_new=is_new)
        self._drafting.reset([req for req in reqs if req.phase is not Phase.FINISHED], self._executor.restart_draft)
        self._plan.drop(self._finished())

    # The device

    def _submit(self, plan: StepPlan) -> Flight:
        drafted, submitted_at = self._drafting.before_step(), self._clock()
        flight = self._executor.submit(plan, self._mem.take_clear_target(), drafted, self._drafting.after_step)
        flight.submitted_at = submitted_at
        return flight

    def _collect(self, flight: Flight) -> None:
        """Read a step and give its tokens out."""
        emitted = self._executor.collect(flight, self._wait)
        # From one read to the next, as long as the device always has something to do.
        since, self._read_at = max(self._read_at, flight.submitted_at), self._clock()
        self._drafting.collected(flight, self._running.values())
        self.counters.num_steps += 1
        num_tokens = 0
        for req, tokens in emitted.items():
            num_tokens += len(tokens) if req not in flight.chunks else 0
            self._book(req, tokens, min(flight.num_drafts, req.num_left - 1) if req in flight.drafted else 0)
        self._text.flush()
        plan = StepPlan(decode=flight.blocks, chunks=flight.chunks, num_drafts=flight.num_drafts)
        # One that was drained, or ran without the draft, costs something else.
        is_typical = self._drafting.is_up and flight.told is not None and flight.is_whole
        self._count(plan, num_tokens, self._read_at - since, is_typical=is_typical)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        check_at, end = time.monotonic() + CHECK_S, time.monotonic() + HANG_S
        while not is_over():
            now = time.monotonic()
            if now >= check_at:
                check_at = now + CHECK_S
                self._drafting.check()
                if self.on_wait is not None:
                    self.on_wait()
            if now >= end:
                if not self._drafting.give_up():
                    raise RuntimeError(f"a step is not over after {HANG_S:g} s")
                end = now + HANG_S
            time.sleep(LOOK_S)

    def _quiesce(self) -> None:
        self._drain()

    def _drain(self, *, is_new: bool = False) -> None:
        """Nothing is under way after this, here or in the draft, and the features of all steps are written.

        is_new: a draft has come up that was told of nobody, and gets none of them.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            self._drafting.expect()
            self._collect(flight)
            if flight.told is None and not is_new:
                self._drafting.send(flight, self._running.values(), StepPlan())
                self._drafting.note(flight)
        self._settle()

    def _settle(self) -> None:
        """The draft's newest turn is over too. No step is under way."""
        if self._drafting.settle():
            self._executor.fence(self._wait)
        self._drafting.confirm(self._running.values())
