"""Which answers make up which step: sequences of like length, in an order that seed and step fix."""

from dataclasses import dataclass

import numpy as np

from draft_worker.train.sequences import Sequences

_ROUND = 32
"""Lengths are padded to a multiple of it."""
_JITTER = 0.1
"""Lengths are taken for up to this share longer when sorting, so that batches differ from pass to pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """n sequences padded to T tokens, and where the blocks of a step begin: A anchors each."""

    tokens: np.ndarray
    """int64 [n, T]; zeros past the end."""
    lens: np.ndarray
    """int64 [n]"""
    prompt_lens: np.ndarray
    """int64 [n]"""
    temperatures: np.ndarray
    """float32 [n]"""
    anchors: np.ndarray
    """int64 [n, A]: positions of anchors in the answers, each with a token after it, ascending."""
    is_anchor: np.ndarray
    """bool [n, A]: False fills up the rows of sequences with fewer places."""

    def __len__(self) -> int:
        return len(self.tokens)


def usable(sequences: Sequences) -> np.ndarray:
    """Indices of sequences with an anchor: two tokens of answer at least."""
    return np.flatnonzero(sequences.lens - sequences.prompt_lens >= 2)


def split_held_out(sequences: Sequences, held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices to train on and indices held out: all answers to `held_out` of the prompts."""
    prompts = np.unique(sequences.groups)
    num = min(held_out, len(prompts) - 1)
    chosen = np.random.default_rng((seed, 1)).permutation(prompts)[:num]
    places = usable(sequences)
    is_out = np.isin(sequences.groups[places], chosen)
    return places[~is_out], places[is_out]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps over some of the sequences, pass after pass."""

    sequences: Sequences
    indices: np.ndarray
    """int64: those that are used."""
    tokens_per_step: int
    seed: int

    def epoch(self, number: int) -> list[np.ndarray]:
        """The batches of a pass: indices of sequences, each batch within tokens_per_step when padded."""
        rng = np.random.default_rng((self.seed, 2, number))
        lens = self.sequences.lens[self.indices]
        order = np.argsort(lens * (1 + _JITTER * rng.random(len(lens))), kind="stable")
        batches, batch, longest = [], [], 0
        for place in order.tolist():
            wider = max(longest, padded_len(int(lens[place])))
            if batch and wider * (len(batch) + 1) > self.tokens_per_step:
                batches.append(self.indices[batch])
                batch, wider = [], padded_len(int(lens[place]))
            batch.append(place)
            longest = wider
        batches.append(self.indices[batch])
        return [batches[index] for index in rng.permutation(len(batches))]


def padded_len(length: int) -> int:
    """The next multiple of _ROUND."""
    return -(-length // _ROUND) * _ROUND


def make_batch(sequences: Sequences, indices: np.ndarray, stride: int, rng: np.random.Generator) -> Batch:
    """Those sequences, with an anchor for every `stride` places of the longest answer, drawn by rng.

    stride 1 takes every place.
    """
    lens = sequences.lens[indices]
    prompt_lens = sequences.prompt_lens[indices].astype(np.int64)
    tokens = np.zeros((len(indices), padded_len(int(lens.max()))), dtype=np.int64)
    for row, index in zip(tokens, indices.tolist(), strict=True):
        part = sequences[index]
        row[: len(part)] = part
    # Places [prompt_len, len - 1): the anchor is a token of the answer, and so is the one after it.
    num_places = lens - 1 - prompt_lens
    num_anchors = max(1, -(-int(num_places.max()) // stride))
    order = rng.random((len(indices), int(num_places.max())))
    order[np.arange(order.shape[1]) >= num_places[:, None]] = np.inf
    chosen = np.argpartition(order, num_anchors - 1, axis=1)[:, :num_anchors]
    chosen.sort(axis=1)
    is_anchor = chosen < num_places[:, None]
    anchors = prompt_lens[:, None] + np.where(is_anchor, chosen, 0)
    return Batch(
        tokens=tokens,
        lens=lens,
        prompt_lens=prompt_lens,
        temperatures=sequences.temperatures[indices],
        anchors=anchors,
        is_anchor=is_anchor,
    )
