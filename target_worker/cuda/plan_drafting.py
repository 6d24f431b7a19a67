"""The pipelined scheduler's side of speculation: one Plan behind each step, and when the draft is told anew.

What a plan tells is written once a step that has waited for it is over, or nothing is under way any more. Until then it
is in `DraftState.pending`, and memsvc is not told that it is there: a draft that dies takes it along.
"""

from collections.abc import Callable, Collection

from memsvc.device.lane import Lane
from memsvc.wire.spec import Planned
from target_worker.cuda.executor import Flight
from target_worker.cuda.plan_link import PlanLink
from target_worker.cuda.plan_message import PlanFacts, book, make_plan, members_of, told_of
from target_worker.mem_link import MemLink
from target_worker.plan import StepPlan
from target_worker.req import FeatureRows, Req
from target_worker.width import Width
from target_worker.width_log import WidthLog


class PlanDrafting:
    """Without a draft worker, or while it is down, there are no drafts and everything else is the same."""

    def __init__(self, link: PlanLink | None, mem: MemLink, width: Width, lane: Lane) -> None:
        self._link = link
        self._mem = mem
        self._width = width
        self._lane = lane
        self._closes: list[int] = []
        self._posted = 0
        """F behind the newest step."""
        self._drafted: Collection[Req] = ()
        """Those for whom the newest plans leave drafts."""
        self._waiting: list[Req] = []
        """Those whose prompt ended in the newest step that was told, and that do not decode in the one behind it."""
        self._log = WidthLog()

    @property
    def is_up(self) -> bool:
        """A draft answers."""
        return self._link is not None and self._link.is_up

    @property
    def last(self) -> Planned | None:
        """Reply to the newest plan, for its times."""
        return self._link.last if self._link is not None else None

    def choose(self, num_reqs: int) -> int:
        """k of the next step, if so many requests decode in it."""
        return self._width.choose(num_reqs) if self.is_up else 0

    # Up and down

    def poll(self, running: Collection[Req]) -> bool:
        """True if a draft has come up. It knows nobody: all of `running` have to be reset before the next send."""
        if self._link is None or not self._link.poll():
            return False
        self._drafted = ()
        self._waiting.clear()
        self._closes.clear()
        for req in running:
            req.draft.is_open = False
            req.draft.pending.clear()
        return True

    def check(self) -> None:
        """Notice a draft that is dead or refuses, so that the lane does not wait for it."""
        if self._link is not None:
            self._link.check()

    def give_up(self) -> bool:
        """Kill the draft, for which the lane waits and waits. False if there is none."""
        if self._link is None or not self._link.is_up:
            return False
        self._link.give_up()
        return True

    def reset(self, reqs: Collection[Req], move: Callable[[Req], None]) -> None:
        """The draft knows nothing of reqs from here on. Nothing may be under way.

        move: tells a slot where its draft KV begins now.
        """
        self._mem.reset_draft(list(reqs))
        for req in reqs:
            move(req)

    def close(self, req: Req) -> None:
        """req holds no slot any more."""
        if req.draft.is_open and self.is_up:
            self._closes.append(req.row)
        req.draft.is_open = False
        req.draft.pending.clear()

    # A step

    def before_step(self) -> Collection[Req]:
        """Let the lane wait for the newest plan; those for whom there are drafts then."""
        self._await()
        drafted, self._drafted = self._drafted, ()
        return drafted if self.is_up else ()

    def _await(self) -> bool:
        number = self._link.take_awaited() if self._link is not None else 0
        if number:
            self._lane.await_peer(number)
        return bool(number)

    def after_step(self) -> None:
        """Say on the lane that the step is over, once it is."""
        if self._link is not None:
            self._posted = self._link.next_value()
            self._lane.post(self._posted)

    def send(self, flight: Flight | None, running: Collection[Req], following: StepPlan) -> None:
        """The plan behind `flight`, the newest step: its features, and drafts for `following`, the next one."""
        waiting, self._waiting = self._waiting, []
        if self._link is None or not self._link.is_up:
            self._closes.clear()
            return
        healed = set(self._mem.healed)
        # Of a request with holes the draft knows nothing until it is reset.
        known = [req for req in running if not req.draft.holes and req not in healed]
        late = [req for req in waiting if req in following.decode and req in known]
        if flight is None and not (self._closes or self._mem.clear_draft or late):
            return
        facts = PlanFacts(
            number=self._link.next_value(), after=self._posted, closes=self._closes, clear=self._mem.clear_draft,
            flight=flight, known=known, blocks=following.decode, late=late,
        )  # fmt: skip
        is_sent = self._link.send(make_plan(facts, following.num_drafts))
        self._closes.clear()
        if not is_sent:
            return
        self._mem.clear_draft.clear()
        book(known)
        drafted = members_of(facts) if following.num_drafts else []
        self._drafted = {*drafted} if flight is not None else {*self._drafted, *drafted}
        if flight is not None:
            flight.told = told_of(facts)
            self._waiting = [req for req in flight.ending if req not in following.decode]

    # What is written

    def collected(self, flight: Flight, running: Collection[Req]) -> None:
        """flight is over, and with it the plans sent before it; `running` have their new lengths."""
        self.confirm(running)
        self.note(flight)

    def note(self, flight: Flight) -> None:
        """A flight that is over, and the draft was told: its features will be written, unless the draft dies."""
        if not self.is_up:
            return
        for req in flight.told or ():
            draft, num = req.draft, req.computed_len - req.draft.written_len
            if draft.is_open and num:
                rows = flight.features.get(req)
                draft.pending = [FeatureRows(draft.written_len, num, rows.row if rows is not None else 0)]

    def confirm(self, running: Collection[Req]) -> None:
        """All plans that told of collected flights are over. If the draft is lost, nobody knows how far they came."""
        is_up = self.is_up
        for req in running:
            for rows in req.draft.pending if is_up else ():
                req.draft.written_len = rows.start + rows.num
            req.draft.pending.clear()

    def expect(self) -> None:
        """The only flight that is out will be waited for: be sure that the plan it waits for was taken."""
        # A plan that no flight waits for yet is left alone: the one before it may still run.
        if self._link is not None and not self._link.awaited:
            self._link.answered()

    def settle(self) -> bool:
        """Let the lane wait for the newest plan if no step does; False if there is nothing to wait for."""
        return self._link is not None and self._link.answered() and self._await()

    # What drafts are worth

    def observe_block(self, num_drafts: int, num_accepted: int) -> None:
        """A block was verified, and its request goes on."""
        self._width.observe_block(num_drafts, num_accepted)

    def observe_step(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """The step of `plan`, whose blocks gave so many tokens, took so long."""
        prompt_rows = sum(plan.chunks.values())
        self._width.observe_step(len(plan.decode), plan.num_drafts, num_tokens, prompt_rows, seconds)
        self._log.look(self._width)
