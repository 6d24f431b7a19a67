"""Front <-> tokenizer <-> target: text in, tokens through, text out."""

from memsvc.wire.base import FinishReason, Msg, ReqId


class Sampling(Msg, frozen=True):
    """How tokens are chosen. Defaults switch everything off but sampling at temperature 1."""

    seed: int
    max_tokens: int
    """Counted over the whole answer, tokens before a resubmission included. 0 in Submit: the context decides."""
    temperature: float = 1.0
    """0 is argmax."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and answer (CTRL, arXiv:1909.05858): positive logits divided, negative multiplied."""
    presence_penalty: float = 0.0
    """Over the answer only."""
    frequency_penalty: float = 0.0
    """Over the answer only."""
    min_tokens: int = 0
    """End-of-sequence and stop_token_ids cannot be chosen before this many tokens."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class ChatMessage(Msg, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class ChatPrompt(Msg, frozen=True):
    """Goes through the model's chat template."""

    messages: list[ChatMessage]
    add_generation_prompt: bool = True


class TextPrompt(Msg, frozen=True):
    """Encoded as it is, special tokens by the tokenizer's own post-processor."""

    text: str


class TokenPrompt(Msg, frozen=True):
    """Already tokens (packed int32)."""

    token_ids: bytes


class Submit(Msg, frozen=True):
    """A new request. resumed: tokens (packed) already given out before a process was restarted."""

    rid: ReqId
    prompt: ChatPrompt | TextPrompt | TokenPrompt
    sampling: Sampling
    stop: list[str] = []
    include_stop: bool = False
    priority: int = 0
    salt: str = ""
    resumed: bytes = b""


class Abort(Msg, frozen=True):
    """End rid. A known rid still gets its one terminal message (finish abort); others are ignored."""

    rid: ReqId


class AbortAll(Msg, frozen=True):
    """First message of a starting front or tokenizer: whatever runs belongs to a life that is over."""


class Admit(Msg, frozen=True):
    """A request in tokens: prompt, then what was given out before a restart, packed int32."""

    rid: ReqId
    token_ids: bytes
    prompt_len: int
    sampling: Sampling
    priority: int = 0
    salt: str = ""


class Usage(Msg, frozen=True):
    """Facts of a finished request. accepted[j] = verify steps that accepted j drafts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted: list[int] = []
    num_drafts: int = 0
    """Draft tokens proposed in all."""
    matched_stop: int = -1
    """The token that ended it, -1 if none did."""
    num_retracts: int = 0


class TokensOut(Msg, frozen=True):
    """New tokens (packed) of requests; finished[i] closes rids[i]; usages has one entry per finished rid."""

    rids: list[ReqId]
    token_ids: list[bytes]
    finished: list[FinishReason]
    usages: list[Usage] = []


class Accepted(Msg, frozen=True):
    """The request was encoded and went to the target."""

    rid: ReqId
    prompt_tokens: int


class TextOut(Msg, frozen=True):
    """New text of requests and the tokens it came with; usages has one entry per finished rid.

    Text may lag behind tokens: a token that ends inside a character, or a possible beginning of a
    stop string, is held back until it is decided.
    """

    rids: list[ReqId]
    texts: list[str]
    token_ids: list[bytes]
    finished: list[FinishReason]
    usages: list[Usage] = []
    stops: list[str] = []
    """One entry per finished rid: the stop string that matched, or empty."""


class Failed(Msg, frozen=True):
    """rid ends without (more) text. kind: bad_request, too_large, overloaded or internal."""

    rid: ReqId
    kind: str
    message: str


class EngineStats(Msg, frozen=True):
    """Counters of the target worker since its start, sent a few times a second while they change."""

    num_running: int
    num_waiting: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    num_steps: int
    num_retracts: int
    num_drafts: int
    """Blocks verified."""
    num_draft_tokens: int
    num_accepted: int
    accepted_per_pos: list[int]
    draft_up: bool
    width: int = 0
    """Drafts of each block in the newest step that had any."""
    widths: list[int] = []
    """Numbers of drafts that steps had, ascending; the columns below have an entry for each."""
    width_steps: list[int] = []
    width_tokens: list[int] = []
    """Tokens that the blocks of these steps gave."""
    width_seconds: list[float] = []
    """Time of these steps, prompt chunks in them included."""


FrontToTok = Submit | Abort | AbortAll
TokToFront = Accepted | TextOut | Failed
TokToTarget = Admit | Abort | AbortAll
TargetToTok = TokensOut | Failed
TargetToFront = EngineStats
