"""From logits to tokens: penalties, min_tokens, temperature, filters, and the exponential race.

A token is argmin E_i / p_i over the tokens that may be chosen, ties to the lowest id, with E of
memsvc.device.noise; at temperature 0 it is the argmax. Since only the order counts, p_i is never
normalised: E_i * exp(max - logit_i / temperature) in float64 decides.

The full logits stay on their device; what comes to the host are block maxima and the few logits that
can still win, except for rows with top_k, top_p or min_p.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from memsvc.device.filters import survivors
from memsvc.device.noise import BLOCK_SIZE, block_noise, exponential_noise, seed_words
from memsvc.device.row_sampler import RowSampler

_NUM_FAVOURITES = 8
_FEW = 512
"""Up to so many runners it is quicker to draw noise for all than to look for bounds."""
_SLACK = 1e-5
"""Bounds are loosened by this share, so that rounding can only let more tokens into the race."""


def sample_rows(logits: torch.Tensor, samplers: Sequence[RowSampler]) -> list[int]:
    """One token per row of logits, [n, vocab] of any float dtype, by the sampler of that row. Pushes nothing.

    Logits count as the float32 numbers they are equal to.
    """
    if logits.shape[0] != len(samplers):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(samplers)} samplers")
    logits = adjusted(logits, samplers)
    tokens = [0] * len(samplers)
    groups: dict[str, list[int]] = {"greedy": [], "filtered": [], "whole": []}
    for idx, sampler in enumerate(samplers):
        groups["greedy" if sampler.is_greedy else "filtered" if sampler.has_filter else "whole"].append(idx)
    run = {"greedy": _greedy, "filtered": _filtered, "whole": _whole}
    for name, idxs in groups.items():
        if not idxs:
            continue
        rows = logits if len(idxs) == len(samplers) else logits[idxs]
        for idx, token in zip(idxs, run[name](rows, [samplers[i] for i in idxs]), strict=True):
            tokens[idx] = token
    return tokens


def adjusted(logits: torch.Tensor, samplers: Sequence[RowSampler]) -> torch.Tensor:
    """Logits after penalties and min_tokens, float32; the same tensor if no sampler asks for either."""
    changing = [(row, sampler) for row, sampler in enumerate(samplers) if sampler.changes_logits]
    if not changing:
        return logits
    logits = logits.to(torch.float32, copy=True)
    for row, sampler in changing:
        ids = sampler.penalised_ids()
        if len(ids):
            where = torch.from_numpy(ids).to(logits.device)
            values = logits[row, where].cpu().numpy()
            logits[row, where] = torch.from_numpy(sampler.penalise(ids, values)).to(logits.device)
        if sampler.withholds:
            withheld = [token for token in sampler.withheld_ids if 0 <= token < logits.shape[1]]
            logits[row, withheld] = -torch.inf
    return logits


def choose(
    scores: np.ndarray, token_ids: np.ndarray, samplers: Sequence[RowSampler], noise: np.ndarray | None = None
) -> np.ndarray:
    """Which of K candidates each row takes, int64 [n]: the choice of sample_rows if nothing else could be chosen.

    scores float32 [n, K] stand for logits, token_ids int64 [n, K] distinct in a row. noise: their E
    [n, K] if the caller has it already; it must be that of the samplers' positions.
    """
    values = np.array(scores, dtype=np.float32)
    for row, sampler in enumerate(samplers):
        if sampler.changes_logits:
            values[row] = sampler.adjust(token_ids[row], values[row])
    greedy = np.array([sampler.is_greedy for sampler in samplers], dtype=bool)[:, None]
    values = values / np.where(greedy, np.float32(1), _temperatures(samplers))
    for row, sampler in enumerate(samplers):
        if sampler.has_filter and not sampler.is_greedy:
            kept = survivors(sampler.params, values[row], values[row])
            values[row] = np.where(np.isin(np.arange(len(values[row])), kept), values[row], np.float32(-np.inf))
    if not greedy.all():
        if noise is None:
            key, position = _keys(samplers)
            noise = exponential_noise((key[0][:, None], key[1][:, None]), position[:, None], token_ids)
        times = _times(noise, values, values.max(1, keepdims=True))
        values = np.where(greedy, -values.astype(np.float64), times)
    else:
        values = -values
    first = values.min(1, keepdims=True)
    # Where nothing may be chosen all are NaN or infinite, and the lowest id stands in.
    tied = ~(values > first)
    return np.where(tied, token_ids, np.iinfo(np.int64).max).argmin(1)


def _keys(samplers: Sequence[RowSampler]) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    key = seed_words([sampler.params.seed for sampler in samplers])
    return key, np.array([sampler.position for sampler in samplers], dtype=np.uint64)


def _temperatures(samplers: Sequence[RowSampler]) -> np.ndarray:
    return np.array([[sampler.params.temperature] for sampler in samplers], dtype=np.float32)


def _times(noise: np.ndarray, scaled: np.ndarray, top: np.ndarray) -> np.ndarray:
    """Finishing times E / p up to a factor per row, float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return noise.astype(np.float64) * np.exp(top.astype(np.float64) - scaled)


def _greedy(logits: torch.Tensor, samplers: Sequence[RowSampler]) -> list[int]:
    return argmax_rows(logits)


def _filtered(logits: torch.Tensor, samplers: Sequence[RowSampler]) -> list[int]:
    """The race among what top_k, top_p and min_p leave."""
    tokens = [0] * len(samplers)
    few, many = [], []
    maxima = block_maxima(logits).float().cpu().numpy()
    for idx, (row, sampler) in enumerate(zip(logits.float().cpu().numpy(), samplers, strict=True)):
        temperature = np.float32(sampler.params.temperature)
        kept = survivors(sampler.params, row / temperature, maxima[idx] / temperature)
        if len(kept) <= _FEW:
            few.append((idx, kept, row[kept] / temperature))
        else:
            masked = np.full_like(row, -np.inf)
            masked[kept] = row[kept]
            many.append((idx, masked))
    if few:
        idxs, ids, scaled = zip(*few, strict=True)
        lens = [len(kept) for kept in ids]
        top = np.array([values.max() for values in scaled])
        runners = np.repeat(np.arange(len(ids)), lens), np.concatenate(ids), np.concatenate(scaled)
        for idx, token in zip(idxs, _race(*runners, (top, [samplers[i] for i in idxs])), strict=True):
            tokens[idx] = token
    if many:
        idxs, rows = zip(*many, strict=True)
        for idx, token in zip(idxs, _whole(torch.from_numpy(np.stack(rows)), [samplers[i] for i in idxs]), strict=True):
            tokens[idx] = token
    return tokens


def _whole(logits: torch.Tensor, samplers: Sequence[RowSampler]) -> list[int]:
    """The race over the whole vocabulary, run only over tokens that no bound rules out."""
    vocab = logits.shape[1]
    temperature = _temperatures(samplers)
    maxima = block_maxima(logits).float().cpu().numpy()
    top = maxima.max(1, keepdims=True) / temperature
    key, position = _keys(samplers)
    every = np.arange(maxima.shape[1])[None]
    smallest, owner = block_noise((key[0][:, None], key[1][:, None]), position[:, None], every)
    # Any runner's time bounds the winner's: of each block the owner of its smallest E, and the favourites.
    owned = logits.gather(1, torch.from_numpy(np.minimum(owner, vocab - 1)).to(logits.device)).float().cpu().numpy()
    owned = np.where(owner < vocab, owned / temperature, np.float32(-np.inf))
    best = _times(smallest, owned, top).min(1, keepdims=True)
    ids, values = _favourites(logits, maxima)
    noise = exponential_noise((key[0][:, None], key[1][:, None]), position[:, None], ids)
    best = np.minimum(best, _times(noise, values / temperature, top).min(1, keepdims=True))
    # smallest * exp(top - logit / temperature) <= best, solved for the logit
    least = ((top + np.log(smallest.astype(np.float64) / best)) * temperature).astype(np.float32)
    least -= _SLACK * (1 + np.abs(least))
    rows, blocks = np.nonzero(maxima >= least)
    values, ids = _blocks_of(logits, rows, blocks)
    run, place = np.nonzero(values >= least[rows, blocks][:, None])
    return _race(rows[run], ids[run, place], values[run, place] / temperature[rows[run], 0], (top[:, 0], samplers))


def _favourites(logits: torch.Tensor, maxima: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest token of each of the few blocks with the largest maxima: ids and logits, [n, m]."""
    n, num_blocks = maxima.shape
    m = min(_NUM_FAVOURITES, num_blocks)
    blocks = np.argpartition(maxima, num_blocks - m)[:, num_blocks - m :]
    values, ids = _blocks_of(logits, np.repeat(np.arange(n), m), blocks.flatten())
    place = values.argmax(1)[:, None]
    return np.take_along_axis(ids, place, 1).reshape(n, m), np.take_along_axis(values, place, 1).reshape(n, m)


def _blocks_of(logits: torch.Tensor, rows: np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and ids of whole blocks, [m, BLOCK_SIZE]; a short last block is read with its left neighbour's end."""
    size = min(BLOCK_SIZE, logits.shape[1])
    starts = np.minimum(blocks * BLOCK_SIZE, logits.shape[1] - size)
    windows = logits.unfold(1, size, 1)
    where = torch.from_numpy(rows).to(logits.device), torch.from_numpy(starts).to(logits.device)
    return windows[where].float().cpu().numpy(), starts[:, None] + np.arange(size)


def _race(
    rows: np.ndarray, ids: np.ndarray, scaled: np.ndarray, of_rows: tuple[np.ndarray, Sequence[RowSampler]]
) -> list[int]:
    """Winner of each row among runners sorted by row, then id (repeats are harmless); 0 if a row has none."""
    top, samplers = of_rows
    key, position = _keys(samplers)
    noise = exponential_noise((key[0][rows], key[1][rows]), position[rows], ids)
    times = _times(noise, scaled, top[rows])
    edges = np.searchsorted(rows, np.arange(len(samplers) + 1))
    winners = []
    for start, end in pairwise(edges.tolist()):
        winners.append(int(ids[start + np.argmin(times[start:end])]) if end > start else 0)
    return winners


def block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Largest logit of each run of BLOCK_SIZE tokens, [n, ceil(vocab / BLOCK_SIZE)]."""
    n, vocab = logits.shape
    whole = vocab // BLOCK_SIZE * BLOCK_SIZE
    maxima = logits[:, :whole].reshape(n, -1, BLOCK_SIZE).amax(-1)
    if whole == vocab:
        return maxima
    return torch.cat((maxima, logits[:, whole:].amax(-1, keepdim=True)), dim=1)


def argmax_rows(logits: torch.Tensor) -> list[int]:
    """The token with the largest logit of each row [n, vocab], of equals the lowest id.

    By block maxima: a quarter of torch.argmax's time on the CPU, which has no vector code for it.
    """
    n, vocab = logits.shape
    if n == 0:
        return []
    size = min(BLOCK_SIZE, vocab)
    starts = (block_maxima(logits).argmax(-1) * BLOCK_SIZE).clamp_(max=vocab - size)
    best = logits.unfold(1, size, 1)[torch.arange(n, device=logits.device), starts].argmax(-1)
    return (starts + best).tolist()
