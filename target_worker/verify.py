"""The accept rule: which tokens a verify forward gives out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memsvc.device.noise import seed_words, uniform_noise
from memsvc.device.row_sampler import RowSampler
from memsvc.device.sampling import argmax_rows, sample_rows
from memsvc.wire.base import FinishReason


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One request of a verify: its sampler, standing after the anchor, and the drafts that follow (maybe none)."""

    sampler: RowSampler
    drafts: Sequence[int]

    @property
    def num_rows(self) -> int:
        """Rows of logits it has: one after the anchor and one after each draft."""
        return 1 + len(self.drafts)


def verify_blocks(logits: torch.Tensor, rows: Sequence[VerifyRow], simulate: float = 0.0) -> list[list[int]]:
    """The tokens each request emits: accepted drafts, then the target's own token. At least one each.

    logits [sum of num_rows, vocab], the requests' rows one after another. Row j's token is
    sampled with the counts of all tokens before it; draft j + 1 is accepted iff it is that token. A stop
    token or the max_tokens-th is the last one emitted. Samplers are pushed what is emitted.
    simulate > 0 accepts whatever was drafted, simulate tokens in the mean, for load tests.
    """
    firsts, total = [], 0
    for row in rows:
        firsts.append(total)
        total += row.num_rows
    if total != len(logits):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} blocks of {total} rows in all")
    assert all(row.sampler.finish is FinishReason.RUNNING for row in rows), "a finished request is verified"
    forced = simulate_accepts(simulate, rows) if simulate else [0] * len(rows)
    best = _argmaxes(logits, rows, firsts)
    emitted: list[list[int]] = [[] for _ in rows]
    alive = list(range(len(rows)))
    j = 0
    while alive:
        drawn = [i for i in alive if i not in best and j >= forced[i]]
        tokens = dict(
            zip(drawn, _sample(logits, [firsts[i] + j for i in drawn], [rows[i] for i in drawn]), strict=True)
        )
        still = []
        for i in alive:
            token = rows[i].drafts[j] if j < forced[i] else best[i][j] if i in best else tokens[i]
            emitted[i].append(token)
            rows[i].sampler.push(token)
            accepted = j < len(rows[i].drafts) and rows[i].drafts[j] == token and (not simulate or j < forced[i])
            if accepted and rows[i].sampler.finish is FinishReason.RUNNING:
                still.append(i)
        alive = still
        j += 1
    return emitted


def simulate_accepts(length: float, rows: Sequence[VerifyRow]) -> list[int]:
    """Drafts each request accepts so that blocks emit `length` tokens in the mean, the bonus included.

    The whole part always and one more with the chance of the fraction, by seed and position alone.
    """
    if length < 1.0:
        raise ValueError(f"a simulated accept length of {length} is below 1, the bonus token")
    key = seed_words([row.sampler.params.seed for row in rows])
    chance = uniform_noise(key, np.array([row.sampler.position for row in rows], dtype=np.uint64))
    accepts = int(length) - 1 + (chance < length - int(length))
    return [min(len(row.drafts), int(num)) for row, num in zip(rows, accepts, strict=True)]


def _argmaxes(logits: torch.Tensor, rows: Sequence[VerifyRow], firsts: list[int]) -> dict[int, list[int]]:
    """Argmax of every row of the requests for which no row depends on the one before."""
    plain = [i for i, row in enumerate(rows) if row.sampler.is_greedy and not row.sampler.changes_logits]
    if not plain:
        return {}
    wanted = [firsts[i] + j for i in plain for j in range(rows[i].num_rows)]
    tokens = iter(argmax_rows(logits if len(wanted) == len(logits) else logits[wanted]))
    return {i: [next(tokens) for _ in range(rows[i].num_rows)] for i in plain}


def _sample(logits: torch.Tensor, wanted: list[int], rows: list[VerifyRow]) -> list[int]:
    if not wanted:
        return []
    return sample_rows(logits if len(wanted) == len(logits) else logits[wanted], [row.sampler for row in rows])
