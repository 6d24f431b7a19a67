"""Answers that go round in circles: how much of them repeats."""

import numpy as np
import torch


def repeated_share(tokens: np.ndarray, n: int) -> float:
    """Share of the runs of n tokens that stood in the answer before; 0 for an answer shorter than n."""
    if len(tokens) < n:
        return 0.0
    runs = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, dtype=np.int64), n)
    return 1.0 - len(np.unique(runs, axis=0)) / len(runs)


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
