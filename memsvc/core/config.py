"""What the allocator is told once, at start."""

from dataclasses import dataclass, field

from memsvc.wire.mem import KindSpec

EVICTION_POLICIES = ("lru", "lfu", "slru", "priority", "ttl")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Size of the pool, what its pages hold, and how it is shared. Raises ValueError on nonsense."""

    arena_bytes: int
    """The whole arena: dummy frame, exchange and every page."""
    page_size: int
    """Tokens in one page of every token kind."""
    kinds: list[KindSpec]
    """The first token kind is the target's: the tree's paths. Further token kinds are the draft's."""
    exchange_bytes: int = 0
    """A run of frames after the dummy frame that belongs to no kind."""
    shared_bytes: int = 0
    """Another one, right after the exchange: weights that one client fills and another reads."""
    eviction_policy: str = "lru"
    """Which conversation's tail goes first: lru, lfu, slru (what was hit twice goes last), priority, or
    ttl (lru, and what was unused for ttl_s goes even without need)."""
    ttl_s: float = 3600.0
    """Policy ttl: how long cached text stays unused."""
    checkpoint_interval: int = 0
    """Tokens between the checkpoints of a long prompt, in whole pages; 0 means so many that their states take
    half the bytes of the KV between them."""
    lease_ms: int = 10_000
    """A remote client (pid 0) that is silent for so long is fenced. Local ones live as long as their pid."""
    pin_budget_frames: int = 0
    """Frames that pins may touch in all; requests never count on these."""
    retract_ms: int = 2_000
    """An engine asked to give requests back has so long before it is fenced."""
    slack_tokens: int = 64
    """Slots a request may reserve past prompt + max_new: (steps in flight + 1) * block size."""
    max_extend_tokens: int = 0
    """The most slots past the committed length in one reserve; 0 is no limit. With it, a kind with a
    window needs pages for window + max_extend_tokens of a long request instead of for all of it."""
    low_watermark: float = 0.0
    """Share of the usable frames that an open leaves to the growth of running requests."""
    high_watermark: float = 0.1
    """After a reservation found no room, opens wait until this share of the usable frames is there."""
    engine_quota_frames: dict[str, int] = field(default_factory=dict)
    """Frames' worth of pages that the requests of one engine may hold at once; absent is no limit."""
    salt_quota_frames: dict[str, int] = field(default_factory=dict)
    """The same for the requests of one salt, over all engines."""
    idle_check_s: float = 1.0
    """After so much silence the invariants are checked, in slices of 2 ms."""
    fd_endpoint: str = ""
    """Passed on in Registered."""

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}, must be at least 1")
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ValueError(f"eviction_policy is {self.eviction_policy!r}, must be one of {EVICTION_POLICIES}")
        if not 0 <= self.low_watermark <= self.high_watermark <= 1:
            marks = (self.low_watermark, self.high_watermark)
            raise ValueError(f"need 0 <= low_watermark <= high_watermark <= 1, got {marks}")
        for name in (
            "exchange_bytes",
            "shared_bytes",
            "lease_ms",
            "pin_budget_frames",
            "retract_ms",
            "slack_tokens",
            "max_extend_tokens",
            "checkpoint_interval",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must not be negative")
        # Written so that NaN is refused too.
        if not self.ttl_s > 0:
            raise ValueError(f"ttl_s is {self.ttl_s}, must be positive")
        check_kinds(self.kinds, self.page_size)


def check_kinds(kinds: list[KindSpec], page_size: int) -> None:
    """Raise ValueError unless these kinds can live in one pool."""
    names = [kind.name for kind in kinds]
    if len(set(names)) != len(names):
        raise ValueError(f"kind names repeat: {names}")
    for kind in kinds:
        if kind.page_bytes < 1:
            raise ValueError(f"kind {kind.name}: page_bytes is {kind.page_bytes}")
        if kind.tokens_per_page not in (0, page_size):
            raise ValueError(f"kind {kind.name}: tokens_per_page is {kind.tokens_per_page}, must be 0 or {page_size}")
        if (kind.tokens_per_page == 0) != (kind.pages_per_req > 0):
            raise ValueError(
                f"kind {kind.name}: pages_per_req is {kind.pages_per_req}; only per-request kinds have any"
            )
        if kind.is_state and kind.tokens_per_page:
            raise ValueError(
                f"kind {kind.name}: is_state with {kind.tokens_per_page} tokens a page; states are held per request"
            )
        if kind.window < 0:
            raise ValueError(f"kind {kind.name}: window is {kind.window}, must not be negative")
    primary = next((kind for kind in kinds if kind.tokens_per_page), None)
    if primary is None:
        raise ValueError(f"no token kind among {names}")
    if primary.window:
        raise ValueError(f"kind {primary.name}: the first token kind carries the tree and cannot have a window")
