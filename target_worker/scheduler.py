"""The step loop: take in, ask for memory, draft, forward, verify, hand out."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from target_worker.config import TargetConfig
from target_worker.drafting import Drafting
from target_worker.executor import Executor
from target_worker.keeper import IDLE_POLL_S, RequestKeeper
from target_worker.mem_link import MemLink
from target_worker.plan import StepPlan
from target_worker.spec_link import SpecLink
from target_worker.text_link import TextLink
from target_worker.trace import StepTrace
from target_worker.width import Width, make_width


@dataclass(frozen=True, slots=True)
class Links:
    """The scheduler's neighbours. spec is None without speculation."""

    mem: MemLink
    text: TextLink
    spec: SpecLink | None


class Scheduler(RequestKeeper):
    """One call of `step` is one forward, computed and read before the next.

    The Step message for the forward after it is on its way while this one computes, so slots are asked for one step
    ahead.
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
        self._drafting = Drafting(config, links.spec, links.mem, width or make_width(config))
        super().__init__(config, links.mem, links.text, self._drafting, executor)
        self._clock = clock
        self._executor = executor
        self._trace = StepTrace(config.spec_trace)

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
        self._follow(following, stepped)
        self._count(plan, num_tokens, self._clock() - started, is_typical=stepped.no_room is None)
        self._report()
        self._pause(plan)

    def _quiesce(self) -> None:
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
            self._book(req, tokens, len(drafts.get(req.rid, [])))
        self._text.flush()
        self._trace.end(self._drafting.last)
        return sum(len(emitted[req]) for req in plan.decode)
