"""What the next forward computes: every decoding request's block, and prompt chunks in the rest of the rows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from target_worker.config import TargetConfig
from target_worker.req import Phase, Req, state_reach


@dataclass(slots=True)
class StepPlan:
    """decode: requests with a block of 1 + num_drafts rows. chunks: prompt tokens to compute, by request."""

    decode: list[Req] = field(default_factory=list)
    chunks: dict[Req, int] = field(default_factory=dict)
    num_drafts: int = 0
    """k of this step, the same for all blocks."""
    feature_row: int = 0
    """Exchange row for the features of its first row."""

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)

    @property
    def num_rows(self) -> int:
        """Rows of the forward, at most: blocks may lack drafts."""
        return len(self.decode) * (1 + self.num_drafts) + sum(self.chunks.values())

    def reqs(self) -> list[Req]:
        """Everyone in it."""
        return [*self.decode, *self.chunks]

    def drop(self, reqs: Iterable[Req]) -> None:
        """Take requests out that no longer run."""
        gone = set(reqs)
        self.decode = [req for req in self.decode if req not in gone]
        self.chunks = {req: num for req, num in self.chunks.items() if req not in gone}


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans one forward ahead, since slots for it are asked for while the one before it runs."""

    config: TargetConfig
    choose: Callable[[int], int]
    """k for a step in which so many requests decode."""

    def after(self, plan: StepPlan, running: Iterable[Req]) -> StepPlan:
        """The forward after `plan`, as if nobody finished in it. Requests keep their order of arrival."""
        following = StepPlan()
        prefill: list[tuple[Req, int]] = []
        for req in running:
            left = req.extend_len - plan.chunks.get(req, 0)
            if self._is_freezing(req, plan, left):
                continue
            if req.phase is Phase.DECODE or (req.phase is Phase.PREFILL and left == 0):
                following.decode.append(req)
            elif req.phase is Phase.PREFILL:
                prefill.append((req, left))
        following.num_drafts = self.choose(len(following.decode))
        budget = self.config.sizes.chunk_tokens(following.num_rows)
        for req, left in prefill:
            num = self._to_checkpoint(req, req.computed_len + plan.chunks.get(req, 0), min(left, budget))
            if num <= 0:
                break
            following.chunks[req] = num
            budget -= num
        return following

    def _is_freezing(self, req: Req, plan: StepPlan, left: int) -> bool:
        """`plan` brings the state of req to a checkpoint, and the next forward would write over it.

        It is left out of that one then, which runs beside the Step that freezes the state. A prompt's first token
        does not wait for that, its first block does.
        """
        if req.state is None or req not in plan.chunks:
            return False
        end = req.computed_len + plan.chunks[req]
        edge = self._edge(state_reach(end, is_last=left == 0))
        # Of a block only the anchor is certain, on a device not even that, so most blocks write no state.
        num_certain = 0 if self.config.is_cuda else 1
        return edge in req.state.wanted and (left > 0 or self._edge(end + num_certain) > edge)

    def _to_checkpoint(self, req: Req, start: int, num: int) -> int:
        """Of num tokens from start on, those up to the next checkpoint, if the state would not stand there anyway."""
        wanted = req.state.wanted if req.state is not None else []
        stop = next((length for length in wanted if start < length < start + num), 0)
        reach = state_reach(start + num, is_last=start + num == len(req.tokens))
        return stop - start if stop and self._edge(reach) != stop else num

    def _edge(self, length: int) -> int:
        return length // self.config.page_size * self.config.page_size

    def slots_needed(self, req: Req, plan: StepPlan, following: StepPlan) -> int:
        """Tokens from position 0 on that must have slots before `following` runs, `plan` still in flight."""
        length = req.computed_len
        for step in (plan, following):
            if req in step.chunks:
                length += step.chunks[req]
            elif req in step.decode:
                length += 1 + step.num_drafts
        return min(length, req.end_len)
