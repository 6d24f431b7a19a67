"""Decode attention in Triton: each row reads exactly the tokens it has, out of a dense cache of longer rows."""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl

_BLOCK = 64
_LEAST_ROWS = 16
"""Rows that tl.dot needs at least; the heads of a group are padded to it."""


@triton.jit
def _decode(q, keys, values, lens, out, scale, row_stride, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
            DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    length = (tl.load(lens + row) + 1).to(tl.int32)
    dims, group, steps = tl.arange(0, DIM), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = ((row * KV_HEADS + head) * GROUP + group)[:, None] * DIM + dims[None, :]
    queries = tl.load(q + at, mask=(group < GROUP)[:, None], other=0.0)
    # A cache is larger than 2^31 elements.
    base = row.to(tl.int64) * row_stride + head * DIM
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, length, BLOCK):
        here = start + steps
        seen = here < length
        place = base + here[:, None] * (KV_HEADS * DIM) + dims[None, :]
        k = tl.load(keys + place, mask=seen[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(k)) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        v = tl.load(values + place, mask=seen[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=(group < GROUP)[:, None])


def decode_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """[n, heads, d]: q [n, heads, d] over positions [0, lens[n]] of the caches [n, S, kv_heads, d]; lens int64 [n].

    d must be a power of two of at least 16.
    """
    n, num_heads, dim = q.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    out = torch.empty((n, num_heads, dim), dtype=q.dtype, device=q.device)
    _decode[(n, num_kv_heads)](
        q.contiguous(), keys, values, lens, out, dim**-0.5, keys.stride(0), GROUP=group, KV_HEADS=num_kv_heads,
        DIM=dim, ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)), BLOCK=_BLOCK,
    )  # fmt: skip
    return out
