"""Counters of the target worker."""

from dataclasses import dataclass, field

from memsvc.wire.text import EngineStats
from target_worker.req import Req


@dataclass(slots=True)
class WidthCount:
    """Steps with blocks of one number of drafts."""

    num_steps: int = 0
    num_tokens: int = 0
    """Tokens that the blocks gave, those of prompts that were complete apart."""
    seconds: float = 0.0


@dataclass(slots=True)
class Counters:
    """Since the worker's start; see EngineStats for the meaning of each."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    num_steps: int = 0
    num_retracts: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    width: int = 0
    widths: dict[int, WidthCount] = field(default_factory=dict)
    """By number of drafts."""

    def count_step(self, num_drafts: int, num_tokens: int, seconds: float) -> None:
        """Book a step in which requests decoded."""
        self.width = num_drafts
        count = self.widths.setdefault(num_drafts, WidthCount())
        count.num_steps += 1
        count.num_tokens += num_tokens
        count.seconds += seconds

    def count_verify(self, req: Req, num_drafts: int, num_accepted: int) -> None:
        """Book one verified block of a request, there and here."""
        req.count_verify(num_drafts, num_accepted)
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted += num_accepted
        self.accepted_per_pos.extend([0] * (num_drafts - len(self.accepted_per_pos)))
        for pos in range(num_accepted):
            self.accepted_per_pos[pos] += 1

    def message(self, num_running: int, num_waiting: int, *, draft_up: bool) -> EngineStats:
        """The counters as they go to the front."""
        widths = sorted(self.widths)
        counts = [self.widths[width] for width in widths]
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            num_steps=self.num_steps,
            num_retracts=self.num_retracts,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted=self.num_accepted,
            accepted_per_pos=list(self.accepted_per_pos),
            draft_up=draft_up,
            width=self.width,
            widths=widths,
            width_steps=[count.num_steps for count in counts],
            width_tokens=[count.num_tokens for count in counts],
            width_seconds=[count.seconds for count in counts],
        )
