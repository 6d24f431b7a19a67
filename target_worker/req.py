"""One request as the target worker knows it. Lengths that follow from others are properties."""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from memsvc.device.row_sampler import RowSampler
from memsvc.wire.base import FinishReason, PageId, ReqId, unpack_tokens
from memsvc.wire.text import Admit, Sampling, Usage


class Phase(Enum):
    """Where a request stands. FINISHED still holds memory until its close is sent."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Features of tokens [start, start + num) of a request lie in exchange rows [row, row + num)."""

    start: int
    num: int
    row: int


@dataclass(slots=True)
class DraftState:
    """What the draft worker holds of a request. written_len tokens have draft KV from valid_from on."""

    valid_from: int = 0
    written_len: int = 0
    pages: list[PageId] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    """Indices of `pages` that the draft has not been told yet."""
    is_open: bool = False
    """The running draft process knows this request."""
    told_tokens: int = 0
    """Tokens of the request that the draft knows, for penalties."""
    pending: list[FeatureRows] = field(default_factory=list)
    """Features of the last forwards, in order, to be written with the next Propose."""
    holes: set[int] = field(default_factory=set)
    """Indices of pages that memsvc took and could not replace yet: the draft knows nothing of the request then."""

    def reset(self, length: int) -> None:
        """A new draft process knows nothing: its context begins at token `length`."""
        self.valid_from = self.written_len = length
        self.is_open = False
        self.pending.clear()
        self.changed.clear()
        self.holes.clear()


@dataclass(slots=True)
class RecurrentState:
    """Where the linear layers of a hybrid target stand with a request, in tokens, all at page edges."""

    length: int
    """Of the newest state; the rings hold what was computed after it."""
    frozen_len: int
    """Of the checkpoint it went on from last. Up to there nothing of its own is worth keeping."""
    wanted: list[int]
    """Where the memory service wants a checkpoint, ascending, not before `length`."""

    @property
    def is_due(self) -> bool:
        """It stands where a checkpoint is wanted, and no Step since then has asked for one."""
        return self.length in self.wanted


def state_reach(end: int, *, is_last: bool) -> int:
    """A chunk up to token `end` of a prompt brings the state to the last page edge up to here; is_last: it ends it.

    The state never passes the prompt's last token, which an identical prompt computes again: it goes on before that.
    """
    return end - is_last


@dataclass(slots=True, eq=False)
class Req:
    """tokens = prompt and answer so far. KV of [0, computed_len) is final."""

    rid: ReqId
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    priority: int
    salt: str
    arrival: int
    phase: Phase = Phase.WAITING
    finish: FinishReason = FinishReason.RUNNING
    computed_len: int = 0
    allocated_len: int = 0
    """Tokens that have a slot, a multiple of the page size."""
    row: int = 0
    """Row in the target's page tables while open."""
    told_len: int = 0
    """computed_len as memsvc knows it."""
    told_draft_len: int = 0
    told_tokens: int = 0
    """Tokens memsvc knows: those it was opened with and those committed since."""
    draft: DraftState = field(default_factory=DraftState)
    state: RecurrentState | None = None
    """Hybrid targets only, while open."""
    cached_tokens: int = -1
    """Hit length of the first open, -1 before it."""
    accepted: list[int] = field(default_factory=list)
    """accepted[j] = verify steps that accepted j drafts."""
    num_draft_tokens: int = 0
    num_retracts: int = 0
    matched_stop: int = -1
    sampler: RowSampler | None = None
    """Made with the first token, and then one token ahead of `tokens` until those are booked."""

    @classmethod
    def from_admit(cls, msg: Admit, arrival: int) -> "Req":
        """A waiting request. Raises ValueError if the lengths in the message do not fit each other."""
        tokens = unpack_tokens(msg.token_ids)
        if not 0 < msg.prompt_len <= len(tokens):
            raise ValueError(f"rid {msg.rid}: prompt_len {msg.prompt_len} of {len(tokens)} tokens")
        if msg.sampling.max_tokens <= len(tokens) - msg.prompt_len:
            raise ValueError(
                f"rid {msg.rid}: {len(tokens) - msg.prompt_len} of {msg.sampling.max_tokens} tokens are there already"
            )
        return cls(msg.rid, tokens, msg.prompt_len, msg.sampling, msg.priority, msg.salt, arrival)

    @property
    def n_out(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.sampling.max_tokens - self.n_out

    @property
    def end_len(self) -> int:
        """No position at or past this is ever computed: the last token's KV is not needed."""
        return self.prompt_len + self.sampling.max_tokens

    @property
    def extend_len(self) -> int:
        """Tokens whose KV is not computed yet; 1 (the anchor) while decoding."""
        return len(self.tokens) - self.computed_len

    def sampler_of(self, eos_ids: Collection[int]) -> RowSampler:
        """Its sampler, made at the first call. eos_ids: the model's."""
        if self.sampler is None:
            prompt, output = self.tokens[: self.prompt_len], self.tokens[self.prompt_len :]
            self.sampler = RowSampler(self.sampling, eos_ids=eos_ids, prompt=prompt, output=output)
        return self.sampler

    def retract(self) -> None:
        """Back to a request that holds nothing but its tokens."""
        self.computed_len = self.allocated_len = self.row = 0
        self.told_len = self.told_draft_len = self.told_tokens = 0
        self.draft = DraftState()
        self.state = None
        self.num_retracts += 1

    def usage(self) -> Usage:
        """The facts that go out with the terminal message."""
        return Usage(
            prompt_tokens=self.prompt_len,
            completion_tokens=self.n_out,
            cached_tokens=max(0, self.cached_tokens),
            accepted=list(self.accepted),
            num_drafts=self.num_draft_tokens,
            matched_stop=self.matched_stop,
            num_retracts=self.num_retracts,
        )

    def count_verify(self, num_drafts: int, num_accepted: int) -> None:
        """Book one verify step of num_drafts > 0 drafts."""
        missing = num_accepted + 1 - len(self.accepted)
        self.accepted.extend([0] * max(0, missing))
        self.accepted[num_accepted] += 1
        self.num_draft_tokens += num_drafts
