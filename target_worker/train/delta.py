"""The gated delta rule of whole sequences, for training: chunks in parallel, then a short walk over their states.

memsvc/device/gated_delta.py has the formulas and computes the same for serving, chunk after chunk. Here everything
but the states' walk is done for all chunks at once, out of place, so that gradients can be asked for.
"""

import torch

from target_worker.train.fused import Fused

CHUNK = 64


def chunked_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Outputs [n, T, v_heads, v_dim] float32 of n sequences from the zero state.

    q, k [n, T, k_heads, k_dim] as convolved, v [n, T, v_heads, v_dim], g and beta [n, T, v_heads], all float32;
    T is a multiple of CHUNK.
    """
    system, right, reads, mixes, keys, rates = _prepare(q, k, v, g, beta)
    # The diagonal is taken as 1 and what is above it is not read.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, seen = solved.split([v.shape[3], k.shape[3]], dim=-1)
    states, corrections = _walk(fresh, seen, keys.mT, rates)
    out = reads @ states + mixes @ corrections
    return out.flatten(2, 3).transpose(1, 2)


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What chunks need of each other's rows: system and right side, queries' reads of the state and of corrections,
    keys that write, and the decay of a whole chunk; all [n, heads, chunks, ...]."""
    num_heads, scale = v.shape[2], k.shape[3] ** -0.5
    q, k, v, g, beta = (_chunks(x) for x in (unit(q, num_heads) * scale, unit(k, num_heads), v, g, beta))
    decay = g.cumsum(-1)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    pairs = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, -torch.inf).exp()
    k_beta, grown = k * beta[..., None], decay.exp()[..., None]
    last = decay[..., -1:]
    right = torch.cat((v * beta[..., None], k_beta * grown), dim=-1)
    keys = k * (last - decay).exp()[..., None]
    return (k_beta @ k.mT) * pairs, right, q * grown, (q @ k.mT) * pairs, keys, last.exp()[..., None]


_prepare = Fused(prepare, moving=0)


def unit(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """x [n, T, k_heads, k_dim] at unit length, each head repeated for the value heads that it serves."""
    x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    return x.repeat_interleave(num_heads // x.shape[2], dim=2)


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """[n, T, heads, ...] as [n, heads, T / CHUNK, CHUNK, ...]."""
    return x.transpose(1, 2).unflatten(2, (-1, CHUNK))


def _walk(
    fresh: torch.Tensor, seen: torch.Tensor, keys: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(states before each chunk, corrections of each chunk), chunk by chunk."""
    state = torch.zeros_like(keys[:, :, 0] @ fresh[:, :, 0])
    states, corrections = [], []
    parts = (part.unbind(2) for part in (fresh, seen, keys, decay))
    for new, read, key, rate in zip(*parts, strict=True):
        d = new - read @ state
        states.append(state)
        corrections.append(d)
        state = state * rate + key @ d
    return torch.stack(states, dim=2), torch.stack(corrections, dim=2)
