"""One long stream of tokens, cut into sequences anew in every epoch."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Stream:
    """Tokens of all documents, one after another."""

    tokens: np.ndarray
    """uint16 [n]"""
    length: int
    """Tokens of a sequence."""
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 * self.length + 1:
            raise ValueError(f"{len(self.tokens)} tokens are too few for sequences of {self.length}")

    @property
    def per_epoch(self) -> int:
        """Sequences in an epoch: an epoch's cuts begin anywhere in the first sequence, so the last one may be lost."""
        return (len(self.tokens) - 1) // self.length - 1

    def sequences(self, first: int, num: int) -> np.ndarray:
        """int64 [num, length + 1]: sequences first to first + num - 1 of the run, with the token after each."""
        made = []
        for place in range(first, first + num):
            start, order = self._epoch(place // self.per_epoch)
            begin = start + int(order[place % self.per_epoch]) * self.length
            made.append(self.tokens[begin : begin + self.length + 1])
        return np.stack(made).astype(np.int64)

    def _epoch(self, number: int) -> tuple[int, np.ndarray]:
        """(where the first cut is, order of the sequences)."""
        rng = np.random.default_rng((self.seed, number))
        return int(rng.integers(self.length)), rng.permutation(self.per_epoch)


def held_out_sequences(tokens: np.ndarray, length: int, most: int) -> np.ndarray:
    """int64 [n, length + 1], n <= most: the first tokens, cut without a gap."""
    num = min(most, (len(tokens) - 1) // length)
    if not num:
        raise ValueError(f"{len(tokens)} held-out tokens are too few for a sequence of {length}")
    return np.stack([tokens[i * length : (i + 1) * length + 1] for i in range(num)]).astype(np.int64)
