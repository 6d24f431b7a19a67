"""Answers that go round in circles: how much of them repeats."""

import numpy as np
import torch

_FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that multiplying by it loses no bit of 64."""


def repeated_share(tokens: np.ndarray, n: int) -> float:
    """Share of the runs of n tokens that stood in the answer before; 0 for an answer shorter than n.

    Runs are told apart by 64 bits of each: two of a thousand differ and look alike once in 10^13 answers.
    """
    num_runs = len(tokens) - n + 1
    if num_runs < 1:
        return 0.0
    mixed = np.asarray(tokens).astype(np.uint64) * np.uint64(_FACTOR)
    mixed ^= mixed >> np.uint64(29)
    runs = np.zeros(num_runs, dtype=np.uint64)
    for place in range(n):
        runs *= np.uint64(_FACTOR)
        runs += mixed[place : place + num_runs]
    runs.sort()
    return float(np.count_nonzero(runs[1:] == runs[:-1])) / num_runs


def in_loop(tokens: torch.Tensor, lens: torch.Tensor, *, span: int, max_period: int) -> torch.Tensor:
    """bool [n]: the last `span` of the first lens [n] tokens of each row [n, m] repeat with some period <= max_period.

    Rows shorter than span + max_period are taken as not in a loop.
    """
    reach = span + max_period
    if tokens.shape[1] < reach:
        return torch.zeros_like(lens, dtype=torch.bool)
    start = (lens - reach).clamp_(min=0)
    tail = tokens.gather(1, start[:, None] + torch.arange(reach, device=tokens.device))
    found = torch.zeros_like(lens, dtype=torch.bool)
    for period in range(1, max_period + 1):
        found |= (tail[:, max_period:] == tail[:, max_period - period : reach - period]).all(1)
    return found & (lens >= reach)
