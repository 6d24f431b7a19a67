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
    """Frames of the arena, dummy and exchange included."""
    exchange_bytes: int
    """Rows of features between target and draft."""
    kinds: tuple[KindPlan, ...]
    """Kinds of pages."""
    pool_tokens: int
    """Tokens whose KV of every kind fits together, beside what one request holds whatever its length."""
    lines: tuple[str, ...]
    """The same for people, a fact a line."""
