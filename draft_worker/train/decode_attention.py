"""Which attention a batched decode uses: the Triton kernel where it is right, torch's otherwise."""

import logging
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

DecodeAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q [n, heads, d], keys and values [n, S, kv_heads, d], lens int64 [n]) -> [n, heads, d], over [0, lens[n]] each."""

_TOLERANCE = 2e-2
"""Largest difference that bfloat16 explains, for values of unit size."""
_TRIALS = 20


def torch_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """Reads whole caches and masks what lies past each row's end. See DecodeAttention."""
    n, num_heads, dim = q.shape
    num_kv_heads = keys.shape[2]
    unseen = torch.arange(keys.shape[1], device=q.device) > lens[:, None]
    mask = torch.zeros(unseen.shape, dtype=q.dtype, device=q.device).masked_fill_(unseen, -torch.inf)
    rows = q.reshape(n, num_kv_heads, num_heads // num_kv_heads, dim)
    out = F.scaled_dot_product_attention(
        rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask[:, None, None]
    )
    return out.reshape(n, num_heads, dim)


def choose_attention(num_heads: int, num_kv_heads: int, head_dim: int, like: torch.Tensor) -> DecodeAttention:
    """The faster one for tensors like `like`, tried on some: the kernel must agree with torch to be taken."""
    if like.device.type != "cuda":
        return torch_attention
    try:
        from draft_worker.train.decode_kernel import decode_attention

        generator = torch.Generator(like.device).manual_seed(0)
        q = torch.randn(512, num_heads, head_dim, generator=generator, device=like.device).to(like.dtype)
        form = (512, 768, num_kv_heads, head_dim)
        keys, values = (torch.randn(form, generator=generator, device=like.device).to(like.dtype) for _ in range(2))
        lens = torch.randint(0, 700, (512,), generator=generator, device=like.device)
        error = (decode_attention(q, keys, values, lens) - torch_attention(q, keys, values, lens)).abs().max().item()
        times = [_microseconds(function, (q, keys, values, lens)) for function in (decode_attention, torch_attention)]
    except Exception as reason:
        # Whatever a kernel compiler may raise: without the kernel generation is slower, not wrong.
        logger.warning("decode kernel unusable, torch attention instead: %s", str(reason)[:300])
        return torch_attention
    logger.info("decode attention kernel_us=%d torch_us=%d max_error=%.4f", *times, error)
    return decode_attention if error < _TOLERANCE and times[0] < times[1] else torch_attention


def _microseconds(function: DecodeAttention, args: tuple[torch.Tensor, ...]) -> float:
    function(*args)  # type: ignore[call-arg]
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_TRIALS):
        function(*args)  # type: ignore[call-arg]
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / _TRIALS * 1e6
