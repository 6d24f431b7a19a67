"""The memory plan as data: what the arena is cut into, and how many tokens fit."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class KindPlan:
    """One kind of page."""

    name: str
    """As declared to the memory service."""
    page_bytes: int
    """Bytes of a page."""
    stride_bytes: int
    """Bytes a page takes in a frame, what is left over when the frame is cut included."""
    pages_per_frame: int
    """Pages that a frame is cut into."""
    tokens_per_page: int
    """Tokens of a page; 0 for a page that belongs to one layer of one request."""
    pages_per_req: int
    """Of these latter, how many a request holds; 0 for pages of tokens."""
    window: int
    """Only the last so many tokens are kept; 0 = all."""


@dataclass(frozen=True, slots=True)
class DevicePart:
    """Something that is taken of a CUDA device beside the arena."""

    name: str
    """Process and purpose."""
    num_bytes: int
    """Weights are counted, all else is estimated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan:
    """A CUDA device and what is to be taken of it."""

    name: str
    """Number, model and UUID."""
    total_bytes: int
    """Size of the device."""
    free_bytes: int
    """What nobody had before the start."""
    planned_bytes: int
    """Arena and parts: what the server takes at its peak."""
    parts: tuple[DevicePart, ...]
    """All but the arena."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of the arena and what they hold."""

    arena_bytes: int
    """Size of the arena."""
    smallest_bytes: int
    """The least that works: room for a request of one page."""
    one_request_bytes: int
    """Size that holds one request of context_len."""
    all_requests_bytes: int
    """Size that holds max_running_requests of context_len."""
    frame_bytes: int
    """Size of a frame."""
    num_frames: int
    """Frames of the arena, dummy, exchange and shared weights included."""
    exchange_bytes: int
    """What lies between target and draft: rows of features, and on a CUDA device the state of the slots."""
    kinds: tuple[KindPlan, ...]
    """Kinds of pages."""
    pool_tokens: int
    """Tokens whose KV of every kind fits together, beside what one request holds whatever its length."""
    lines: tuple[str, ...]
    """The same for people, a fact a line."""
    slack_tokens: int = 0
    """Slots that a request needs beyond its tokens, for steps in flight."""
    shared_bytes: int = 0
    """Embedding and head in the arena, where target and drafter both read them."""
    device: DevicePlan | None = None
    """None for an arena in CPU memory."""
