"""A chunk of rows of the gated delta rule at once, on tiles: memsvc.device.gated_delta says what is computed.

With beta at most 1 and rows of unit length (I + A)^-1 holds nothing above 1, nor do the inverses of its diagonal
blocks: so it is put together from these. Its power series would hold numbers of 10^8 where the same row comes again
and again.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)
"""Under the root of the length of q and of k."""


@triton.jit
def products(a, b, total, PRECISION: tl.constexpr):
    """total and the products of each row of a with each of b."""
    return tl.dot(a, tl.trans(b), total, input_precision=PRECISION)


@triton.jit
def one_over_lengths(squares, axis: tl.constexpr):
    """Of rows, of their products with each other [n, n], along an axis of these."""
    n: tl.constexpr = squares.shape[0]
    same = tl.arange(0, n)[:, None] == tl.arange(0, n)[None, :]
    return tl.rsqrt(tl.sum(tl.where(same, squares, 0.0), axis) + EPS)


@triton.jit
def times(a, b, PRECISION: tl.constexpr):
    """a b, of numbers up to 1: tf32 and float16 have the same 11 bits, and float16 is half as much to move about.

    Below 6e-5 it has fewer: what is lost is 3e-8 at most, where sums of these numbers with others near 1 matter.
    """
    if PRECISION == "tf32":
        return tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def left_over(weights, most):
    """What `most`, which is weights in fewer bits, has lost of them, in as few."""
    return (weights - most.to(tl.float32)).to(most.dtype)


@triton.jit
def weighted(weights, rows, total, PRECISION: tl.constexpr):
    """total and, for each row of weights, the sum of rows weighted so.

    For rows in bfloat16 a weight is the sum of two such numbers: 16 bits of it, where tf32 has 11. float16 has not the
    range for that, but tf32 holds its numbers.
    """
    if rows.dtype != tl.bfloat16:
        return tl.dot(weights, rows.to(tl.float32), total, input_precision=PRECISION)
    else:
        most = weights.to(rows.dtype)
        total = tl.dot(most, rows, total)
        return tl.dot(left_over(weights, most), rows, total)


@triton.jit
def taken_in(rows, weights, total, PRECISION: tl.constexpr):
    """total and, for each column of rows, the sum of weights [rows, n] weighted so. As in weighted."""
    if rows.dtype != tl.bfloat16:
        return tl.dot(tl.trans(rows).to(tl.float32), weights, total, input_precision=PRECISION)
    else:
        most = weights.to(rows.dtype)
        total = tl.dot(tl.trans(rows), most, total)
        return tl.dot(tl.trans(rows), left_over(weights, most), total)


@triton.jit
def forgotten(later, earlier, seen):
    """What is left at `later` of what was there at `earlier`, 0 where it is not seen."""
    lost = (later[:, None] - earlier[None, :]).to(tl.float32)
    return tl.exp(tl.where(seen, lost, float("-inf")))


@triton.jit
def inverse(a, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of what is strictly lower triangular [ROWS, ROWS]: blocks of 2, then always two of them to one."""
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    # Rows whose numbers differ in this bit and in higher ones not.
    apart = i ^ j
    found = tl.where(apart == 0, 1.0, tl.where(apart == 1, -a, 0.0))
    for level in tl.static_range(1, 10):
        if 2**level < ROWS:
            below = tl.where((apart >= 2**level) & (apart < 2 ** (level + 1)), a, 0.0)
            found -= times(found, times(below, found, PRECISION), PRECISION)
    return found


@triton.jit
def solve(kk, decay, beta, at, PRECISION: tl.constexpr):
    """(I + A)^-1 times beta: what rows add to the state, by what they ask for. kk: products of rows as they are.

    Whoever needs a row's length too asks for it once more: the compiler sees that it is the same.
    """
    kk *= one_over_lengths(kk, 1)[:, None] * one_over_lengths(kk, 0)[None, :]
    a = kk * beta[:, None] * forgotten(decay, decay, at[None, :] < at[:, None])
    return inverse(a, a.shape[0], PRECISION) * beta[None, :]
