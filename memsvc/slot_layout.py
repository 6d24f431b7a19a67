"""Where the state of each slot lies in the exchange: what target and draft read and write on the device. No torch.

A slot is a running request's place on the device, 1 to num_slots; slot 0 is the dummy of padded places. The region
begins with the hand-over words. Then come the scalar fields, each int32 [num_slots + 1] (or float32 in as many
bytes), one after another in the order of SCALARS and `stride` apart, so that kernels need no other address than
the region's. Then the lists, and last what penalties need.
"""

from dataclasses import dataclass

_ALIGN = 256
MAX_STOP_IDS = 80
"""Stop ids of a slot: those that a request may name, and the model's own."""

SCALARS: tuple[str, ...] = (
    "length",
    "anchor",
    "num_rows",
    "feature_row",
    "feature_start",
    "done",
    "num_drafts",
    "num_emitted",
    "n_out",
    "num_tokens",
    "max_tokens",
    "min_tokens",
    "num_stop_ids",
    "num_withheld_ids",
    "valid_from",
    "temperature",
    "top_k",
    "top_p_low",
    "top_p_high",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed_low",
    "seed_high",
)
FLOATS = frozenset({"temperature", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"})
"""Scalars that are float32."""

NOT_DONE, DONE_STOP, DONE_LENGTH, DONE_CLOSED = 0, 1, 2, 3
"""Values of `done`: running, a stop token came, max_tokens are out, nobody is there."""

WORDS_AT = 0
"""Byte offset of the hand-over words F and D, 128 bytes apart, uint32 each."""
SCALARS_AT = _ALIGN
"""Byte offset of the first scalar field."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Byte offsets for num_slots slots besides the dummy, blocks of block_size rows, token ids below vocab."""

    num_slots: int
    block_size: int
    """B: an anchor and B - 1 drafts. At least 1."""
    vocab: int

    @property
    def stride(self) -> int:
        """Elements from one scalar field to the next: num_slots + 1, padded."""
        return _padded(4 * (self.num_slots + 1)) // 4

    @property
    def drafts_at(self) -> int:
        """int32 [num_slots + 1, max(1, B - 1)]: tokens of the newest propose."""
        return SCALARS_AT + 4 * self.stride * len(SCALARS)

    @property
    def emitted_at(self) -> int:
        """int32 [num_slots + 1, B]: tokens of the newest verify."""
        return self.drafts_at + self._bytes(4 * self.draft_width)

    @property
    def stop_ids_at(self) -> int:
        """int32 [num_slots + 1, MAX_STOP_IDS]: those that end the request, then others that min_tokens withholds."""
        return self.emitted_at + self._bytes(4 * self.block_size)

    @property
    def prompt_seen_at(self) -> int:
        """int32 [num_slots + 1, seen_width]: bit t % 32 of word t // 32 is set if token t is in the prompt."""
        return self.stop_ids_at + self._bytes(4 * MAX_STOP_IDS)

    @property
    def counts_at(self) -> int:
        """int16 [num_slots + 1, count_width]: how often each token was given out."""
        return self.prompt_seen_at + self._bytes(4 * self.seen_width)

    @property
    def num_bytes(self) -> int:
        """Of the whole region."""
        return self.counts_at + self._bytes(2 * self.count_width)

    @property
    def draft_width(self) -> int:
        """Drafts of a slot that have a place."""
        return max(1, self.block_size - 1)

    @property
    def seen_width(self) -> int:
        """Words of a row of prompt_seen."""
        return self.count_width // 32

    @property
    def count_width(self) -> int:
        """Elements of a row of counts: vocab, padded."""
        return _padded(self.vocab)

    def _bytes(self, row_bytes: int) -> int:
        return _padded(row_bytes * (self.num_slots + 1))


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
