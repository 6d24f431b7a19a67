"""Admin side of the memory service: what a person or a dashboard asks, never on the hot path."""

from memsvc.wire.base import BadRequest, Done, Msg, PageId, ReqId


class Match(Msg, frozen=True):
    """How much of these tokens is cached. Changes nothing, also not the eviction order."""

    tokens: bytes
    salt: str = ""


class Matched(Msg, frozen=True):
    """prefix_len tokens have target pages; the draft could read from draft_valid_from.

    state_len is the last length up to there with a checkpoint, which is where a recurrent model goes on.
    """

    prefix_len: int
    draft_valid_from: int
    state_len: int = 0


class Pin(Msg, frozen=True):
    """Keep the cached prefix of tokens for ttl_s seconds. Refused past the pin budget."""

    name: str
    tokens: bytes
    ttl_s: float
    salt: str = ""


class Pinned(Msg, frozen=True):
    """pinned_len tokens are held; budget_left is in frames."""

    pinned_len: int
    budget_left: int


class Unpin(Msg, frozen=True):
    """Let go of the pin of that name."""

    name: str


class Flush(Msg, frozen=True):
    """Evict everything that no request and no pin holds."""


class Evict(Msg, frozen=True):
    """Evict at least num_pages pages of one kind, if that many are evictable."""

    kind: str
    num_pages: int


class Evicted(Msg, frozen=True):
    """Pages freed, by kind."""

    num_pages: list[int]


class GetStats(Msg, frozen=True):
    """Ask for Stats."""


class KindStats(Msg, frozen=True):
    """Pages of one kind by state; they sum to num_pages_cut, the pages of the frames cut for it."""

    name: str
    page_bytes: int
    num_frames: int
    num_pages_cut: int
    num_free: int
    num_private: int
    num_tree: int
    num_pinned: int
    num_limbo: int
    num_quarantine: int


class Stats(Msg, frozen=True):
    """Counters since start and the arena now. frames_* sum to num_frames."""

    num_frames: int
    frame_bytes: int
    frames_dummy: int
    frames_exchange: int
    frames_empty: int
    kinds: list[KindStats]
    num_reqs: int
    elder: int
    """rid of the oldest running request, which is never retracted for another one's sake; 0 if none runs."""
    num_clients: int
    hit_tokens: int
    queried_tokens: int
    draft_hit_short: int
    """Opens whose draft_valid_from left part of the window uncovered."""
    evicted_pages: list[int]
    num_opens: int
    num_closes: dict[str, int]
    num_no_room: int
    num_too_large: int
    num_steps: int
    step_seconds: float
    """Time spent in handling Step messages."""
    unusable_bytes: int
    """Free bytes that no kind can use as they are: holes in frames cut for another kind."""
    num_bad_frames: int = 0
    num_checkpoints: int = 0
    """Checkpoints in the tree now."""
    num_frozen: int = 0
    """States that became checkpoints."""
    num_freeze_skipped: int = 0
    """Those that did not for want of room."""
    num_thinned: int = 0
    """Checkpoints given up because others on their path are as good."""
    state_short_tokens: int = 0
    """Tokens whose target pages were cached, but after the last checkpoint: computed again."""
    frames_shared: int = 0
    """Frames of weights that two clients read."""


class Check(Msg, frozen=True):
    """Walk everything and compare with the counters."""


class Problem(Msg, frozen=True):
    """One thing that is not as it must be, with its owner and age."""

    kind: str
    page: PageId
    state: str
    owner: str
    age_s: float
    what: str


class CheckReport(Msg, frozen=True):
    """Empty problems = all invariants hold. leaked_bytes: pages that no list and no owner has."""

    problems: list[Problem]
    num_pages_checked: int
    leaked_bytes: int


class Snapshot(Msg, frozen=True):
    """Ask who holds what."""


class ReqInfo(Msg, frozen=True):
    """One open request, as memsvc sees it."""

    rid: ReqId
    engine: str
    salt: str
    priority: int
    committed_len: int
    draft_len: int
    draft_valid_from: int
    num_pages: list[int]
    age_s: float


class SnapshotReport(Msg, frozen=True):
    """Open requests, and the tree's largest branches by tokens."""

    reqs: list[ReqInfo]
    num_nodes: int
    num_tree_tokens: int
    pins: dict[str, int]
    """Pin name to pinned tokens."""


AdminRequest = Match | Pin | Unpin | Flush | Evict | GetStats | Check | Snapshot
AdminReply = Matched | Pinned | Done | Evicted | Stats | CheckReport | SnapshotReport | BadRequest
