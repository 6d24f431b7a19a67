"""The k best tokens of each row, by (logit descending, id ascending), exactly and without a sort.

As draft_worker's CandidateFinder: the k best tokens lie in the k best groups of neighbours, groups ordered by
(maximum descending, place ascending). One pass over the logits takes maxima; one program a row then picks groups,
and tokens of those, in k rounds each.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from memsvc.device.kernels.launch import cut, launch, padded
from memsvc.device.kernels.row_tiles import block_maxima, key_value, order_key

MAX_K = 64
MAX_GROUPS = 8192
"""Of a row: one program holds their maxima in registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKTile:
    """Sizes to choose by measurement. All powers of two."""

    group: int = 128
    """Neighbours whose maximum is taken first: 64 to 256."""
    groups: int = 64
    """Groups a program of the first pass."""
    width: int = 64
    """Columns of them it reads at a time, at most `group`."""
    first_warps: int = 4
    pick_warps: int = 4


TILE = TopKTile()

_NOTHING = tl.constexpr(-(2**63))
_ID_BITS = tl.constexpr(32)


@triton.jit
def group_maxima(logits, row_stride, col_stride, vocab, maxima, num_groups, GROUP: tl.constexpr, NUM: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    """Program (c, r): maxima float32 [rows, num_groups] of groups [c * NUM, (c + 1) * NUM) of row r."""
    row = tl.program_id(1).to(tl.int64)
    groups = tl.program_id(0) * NUM + tl.arange(0, NUM)
    top = block_maxima(logits + row * row_stride, col_stride, vocab, groups, GROUP, WIDTH, NUM)
    tl.store(maxima + row * num_groups + groups, top, mask=groups < num_groups)


@triton.jit
def scaled(x, multiplier, cap, HAS_CAP: tl.constexpr):
    """Multiplier and softcap as CandidateFinder has them; tanh by way of float64."""
    x = x * multiplier
    if HAS_CAP:
        shrunk = tl.exp(tl.div_rn(x, tl.zeros_like(x) + cap).to(tl.float64) * 2.0)
        tanh = (1.0 - 2.0 / (shrunk + 1.0)).to(tl.float32)
        x = tl.where(x == x, tanh, x) * cap
    return x


@triton.jit
def ranked(values, ids):
    """int64 keys in the order of (value, lower id first): no two are equal."""
    return (order_key(values).to(tl.int64) << _ID_BITS) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def id_of(key):
    """The id of a key of `ranked`."""
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def best_of(keys, K: tl.constexpr, K_PAD: tl.constexpr):
    """The K largest keys [K_PAD], in order, _NOTHING behind them."""
    places = tl.arange(0, K_PAD)
    found = tl.full([K_PAD], _NOTHING, tl.int64)
    for i in range(0, K):
        best = tl.max(keys, 0)
        found = tl.where(places == i, best, found)
        keys = tl.where(keys == best, _NOTHING, keys)
    return found


@triton.jit
def pick(logits, row_stride, col_stride, vocab, maxima, num_groups, values, ids, multiplier, cap, GROUP: tl.constexpr,
         GROUPS: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, HAS_CAP: tl.constexpr):  # fmt: skip
    """Row r: values float32 and ids int32 [rows, K]. GROUPS: num_groups or more, a power of two."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    inside = groups < num_groups
    tops = scaled(tl.load(maxima + row * num_groups + groups, mask=inside, other=0.0), multiplier, cap, HAS_CAP)
    chosen = best_of(tl.where(inside, ranked(tops, groups), _NOTHING), K, K_PAD)
    # _NOTHING stands where there are fewer groups than K: its id would be past every vocabulary.
    starts = tl.where(chosen == _NOTHING, vocab, id_of(chosen) * GROUP)
    tokens = starts[:, None] + tl.arange(0, GROUP)[None, :]
    there = tokens < vocab
    x = tl.load(logits + row * row_stride + tokens * col_stride, mask=there, other=0.0).to(tl.float32)
    keys = tl.where(there, ranked(scaled(x, multiplier, cap, HAS_CAP), tokens), _NOTHING)
    found = best_of(tl.reshape(keys, [K_PAD * GROUP], can_reorder=True), K, K_PAD)
    places = tl.arange(0, K_PAD)
    at = row * K + places
    tl.store(values + at, key_value((found >> _ID_BITS).to(tl.int32)), mask=places < K)
    tl.store(ids + at, id_of(found), mask=places < K)


def top_k(
    logits: torch.Tensor,
    k: int,
    multiplier: float = 1.0,
    softcap: float = 0.0,
    *,
    tile: TopKTile = TILE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values float32, ids int32), each [rows, k] in order, of logits [rows, vocab] of any strides; 1 <= k <= vocab.

    Logits count as c * tanh(multiplier * x / c), or multiplier * x if the softcap c is 0. NaN comes first.
    """
    num_rows, vocab = logits.shape
    if not 1 <= k <= min(vocab, MAX_K):
        raise ValueError(f"the {k} best of {vocab} tokens, at most {MAX_K}")
    group = tile.group
    while cut(vocab, group) > MAX_GROUPS:
        group *= 2
    num_groups = cut(vocab, group)
    values = torch.empty((num_rows, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, k), dtype=torch.int32, device=logits.device)
    maxima = torch.empty((num_rows, num_groups), dtype=torch.float32, device=logits.device)
    row = (logits, *logits.stride(), vocab, maxima, num_groups)
    grid = (cut(num_groups, tile.groups), num_rows)
    launch(group_maxima, grid, tile.first_warps, *row, GROUP=group, NUM=tile.groups, WIDTH=tile.width)
    launch(
        pick, (num_rows,), tile.pick_warps, *row, values, ids, multiplier, softcap, GROUP=group,
        GROUPS=padded(num_groups), K=k, K_PAD=padded(k), HAS_CAP=softcap != 0.0,
    )  # fmt: skip
    return values, ids


def argmax(logits: torch.Tensor, *, tile: TopKTile = TILE) -> torch.Tensor:
    """int32 [rows]: the largest logit of each row of [rows, vocab], of equals the lowest id; a NaN comes first."""
    return top_k(logits, 1, tile=tile)[1][:, 0]
