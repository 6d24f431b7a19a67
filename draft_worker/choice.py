"""Which candidates become drafts: a walk from left to right, greedy or with the target's own noise."""

from collections.abc import Callable, Sequence

import numpy as np

from memsvc.device.noise import exponential_noise, seed_words
from memsvc.device.row_sampler import RowSampler
from memsvc.device.sampling import choose

Choice = Callable[[int, np.ndarray, np.ndarray], np.ndarray]
"""(row t from 0, scores float32 [n, K], token ids int64 [n, K]) -> chosen candidates, int64 [n]."""


def is_plain_argmax(sampler: RowSampler) -> bool:
    """Neither noise nor the tokens so far have a say."""
    return sampler.is_greedy and not sampler.changes_logits


def first_best(_row: int, scores: np.ndarray, _token_ids: np.ndarray) -> np.ndarray:
    """The Choice of requests that are all plain argmax: the highest score, of equal ones the first."""
    return scores.argmax(1)


class CoupledChoice:
    """The Choice that asks each request's sampling parameters.

    Noise is keyed by (seed, position, token id), as the target's is: the row that predicts position p
    uses that of p. So a draft falls on the token that the target will draw as often as the two
    distributions allow a pick from a few candidates. Penalties see the drafts before a row.
    """

    def __init__(self, samplers: Sequence[RowSampler], token_ids: np.ndarray) -> None:
        """samplers [n] stand after their anchors and are left as they are. token_ids: candidates [n, k, K]."""
        self._samplers = [sampler.fork() if sampler.changes_logits else sampler for sampler in samplers]
        low, high = (word[:, None, None] for word in seed_words([sampler.params.seed for sampler in samplers]))
        first = np.array([sampler.position for sampler in samplers], dtype=np.uint64)
        positions = first[:, None] + np.arange(token_ids.shape[1], dtype=np.uint64)
        self._noise = exponential_noise((low, high), positions[:, :, None], token_ids)

    def __call__(self, row: int, scores: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """See Choice. Rows must come in order."""
        chosen = choose(scores, token_ids, self._samplers, self._noise[:, row])
        for sampler, ids, index in zip(self._samplers, token_ids, chosen, strict=True):
            if sampler.changes_logits:
                sampler.push(int(ids[index]))
        return chosen


def walk(lattice: np.ndarray, token_ids: np.ndarray, pick: Choice) -> np.ndarray:
    """Tokens int64 [n, k]: each row's candidates are scored after the one picked in the row before.

    lattice float32 [n, k, K before, K], token_ids int64 [n, k, K]. Without a selector the score does
    not depend on what stands before, and K before may be 1.
    """
    n, k, _ = token_ids.shape
    everyone = np.arange(n)
    tokens = np.empty((n, k), dtype=np.int64)
    before = np.zeros(n, dtype=np.int64)
    for row in range(k):
        scores = lattice[everyone, row, before if lattice.shape[2] > 1 else 0]
        before = pick(row, scores, token_ids[:, row])
        tokens[:, row] = token_ids[everyone, row, before]
    return tokens
