"""What a step consists of, by slots: what the executor asks for and the device is given. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from memsvc.wire.base import PageId


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + len(token_ids)) of the request in a slot."""

    slot: int
    start: int
    token_ids: Sequence[int]
    is_last: bool
    """The prompt ends with it: the logits of its last row are wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One step."""

    clear: Sequence[PageId]
    """Pages to zero first."""
    members: Sequence[int]
    """Slots whose blocks are verified."""
    chunks: Sequence[Chunk]
