"""The scheduler's side of speculation: how much is drafted, for whom, and when the draft is given features."""

from collections.abc import Collection, Iterable

from memsvc.wire.base import ReqId
from memsvc.wire.spec import Drafted
from target_worker.backlog import Backlog
from target_worker.config import TargetConfig
from target_worker.mem_link import MemLink
from target_worker.plan import StepPlan
from target_worker.req import Req
from target_worker.spec_link import SpecLink
from target_worker.width import Width
from target_worker.width_log import WidthLog


class Drafting:
    """Without a draft worker, or while it is down, there are no drafts and everything else is the same."""

    def __init__(self, config: TargetConfig, spec: SpecLink | None, mem: MemLink, width: Width) -> None:
        self._spec = spec
        self._mem = mem
        self._width = width
        self._backlog = Backlog(config.max_step_rows, config.page_size, mem.draft_window)
        self._is_complete = False
        """Every block of the step has its drafts."""
        self._drafted = False
        """The step has drafts at all."""
        self._log = WidthLog()

    @property
    def is_up(self) -> bool:
        """A draft answers."""
        return self._spec is not None and self._spec.is_up

    @property
    def last(self) -> Drafted | None:
        """Reply that brought the step's drafts, for its times."""
        return self._spec.last if self._spec is not None and self._drafted else None

    def choose(self, num_reqs: int) -> int:
        """k of the next step, if so many requests decode in it."""
        return self._width.choose(num_reqs)

    def poll(self, running: Collection[Req]) -> None:
        """Notice a draft that has come up, and requests whose last missing draft page has come."""
        if self._spec is not None and self._spec.poll():
            self._backlog.clear()
            self._mem.reset_draft(list(running))
        elif self._mem.healed:
            # This sends a Step of its own, and each releases draft pages.
            self.flush(running)
            self._mem.reset_draft(self._mem.healed)

    def close(self, req: Req) -> None:
        """req holds no memory any more."""
        if self._spec is not None:
            self._spec.close(req)

    def flush(self, running: Collection[Req]) -> None:
        """Have the draft write all that it still lacks. To be called before a Step beside which nothing computes."""
        if self.is_up and any(req.draft.pending for req in running):
            self._propose([], 0, running)

    def drafts(self, plan: StepPlan, running: Collection[Req]) -> dict[ReqId, list[int]]:
        """Drafts for the blocks of `plan`, by request. Says in the plan where its features shall lie.

        A plan that gets none because the draft is down drafts 0 from then on.
        """
        drafts = {}
        if self.is_up and self._backlog.is_due(plan, running):
            drafts = self._propose(plan.decode if plan.num_drafts else [], plan.num_drafts, running)
        if not self.is_up:
            plan.num_drafts = 0
            self._forget(running)
        self._drafted = bool(drafts)
        self._is_complete = self.is_up and (not plan.num_drafts or len(drafts) == len(plan.decode))
        plan.feature_row = self._backlog.place(plan)
        return drafts

    def _propose(self, blocks: list[Req], num_drafts: int, running: Collection[Req]) -> dict[ReqId, list[int]]:
        assert self._spec is not None
        healed = set(self._mem.healed)
        known = []
        for req in running:
            if req.draft.holes or req in healed:
                # The draft knows nothing of it until it is reset.
                req.draft.pending.clear()
            else:
                known.append(req)
        blocks = [req for req in blocks if req in known] if len(known) < len(running) else blocks
        drafts = self._spec.propose(blocks, known, self._mem.clear_draft, num_drafts)
        self._backlog.clear()
        return {req.rid: drafts[req.rid][: req.num_left - 1] for req in blocks if req.rid in drafts}

    def _forget(self, running: Iterable[Req]) -> None:
        """Nobody will write what waits."""
        for req in running:
            req.draft.pending.clear()
        self._backlog.clear()

    def observe_block(self, num_drafts: int, num_accepted: int) -> None:
        """A block was verified, and its request goes on."""
        self._width.observe_block(num_drafts, num_accepted)

    def observe_step(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """The step of `plan`, whose blocks gave so many tokens, took so long."""
        if not self._is_complete:
            return
        prompt_rows = sum(plan.chunks.values())
        self._width.observe_step(len(plan.decode), plan.num_drafts, num_tokens, prompt_rows, seconds)
        self._log.look(self._width)
