"""What lies where in the frames that belong to no kind: the exchange of a CUDA arena, and the shared weights. No torch.

launch sizes them with it and the workers find their parts with it, so both come to the same numbers.
"""

from dataclasses import dataclass

ALIGN = 256
"""Every part begins at a multiple of so many bytes, as a frame does."""


def round_up(num_bytes: int) -> int:
    """num_bytes, or the next multiple of ALIGN."""
    return -(-num_bytes // ALIGN) * ALIGN


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeLayout:
    """Parts of the exchange of a CUDA arena, in bytes from its start: features, then slots.

    The hand-over words are part of the slots (memsvc/slot_layout.py). On the CPU the exchange holds nothing but
    features.
    """

    feature_bytes: int
    """Rows of features, from byte 0."""
    slot_bytes: int
    """State of the slots: SlotLayout.num_bytes."""

    @property
    def slots(self) -> int:
        """Where the slots begin."""
        return round_up(self.feature_bytes)

    @property
    def num_bytes(self) -> int:
        """The whole exchange."""
        return self.slots + round_up(self.slot_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedForm:
    """The two matrices that target and draft read: the embedding [vocab, hidden], then the head if it is another."""

    vocab_size: int
    """Rows of each."""
    hidden_size: int
    """Columns of each."""
    item_bytes: int
    """Bytes of a number."""
    is_tied: bool
    """The head is the embedding."""

    @property
    def matrix_bytes(self) -> int:
        """One of them."""
        return self.vocab_size * self.hidden_size * self.item_bytes

    @property
    def head_offset(self) -> int:
        """Where the head begins, in bytes from the first."""
        return 0 if self.is_tied else round_up(self.matrix_bytes)

    @property
    def num_bytes(self) -> int:
        """All of them, as the pool reserves them."""
        return self.head_offset + round_up(self.matrix_bytes)
