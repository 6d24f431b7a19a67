"""The noise of memsvc.device.noise inside kernels: the same hash bits, and E within an ulp of float64 before rounding.

u = (w + 1/2) / 2^32 makes 1 - u a number of 33 bits, exact in float64. So -log1p(-u) is -log(1 - u), and one
float64 logarithm, which every backend has, replaces log1p. Two correct libraries differ in the last bit of some
float64 logarithms; the float32 that E is rounded to differs where the two lie on both sides of a rounding
boundary, for about one word in 2^30.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from memsvc.device import noise

BLOCK_SIZE = tl.constexpr(noise.BLOCK_SIZE)
"""Tokens that share one draw of the first level."""

_STREAM_BLOCK = tl.constexpr(noise.STREAM_BLOCK)
_STREAM_TOKEN = tl.constexpr(noise.STREAM_TOKEN)
_STREAM_DECIDE = tl.constexpr(noise.STREAM_DECIDE)
_OWNER_SHIFT = tl.constexpr(24)


@triton.jit
def philox(index, position, stream, seed_low, seed_high):
    """Words 0 and 1 (uint32, index's shape) of Philox4x32-10 at counter (index, position, stream, 0)."""
    c0 = index.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0) + stream
    c3 = tl.zeros_like(c0)
    k0 = tl.zeros_like(c0) + seed_low.to(tl.uint32, bitcast=True)
    k1 = tl.zeros_like(c0) + seed_high.to(tl.uint32, bitcast=True)
    first = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    second = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, first), c0 * first
        high1, low1 = tl.umulhi(c2, second), c2 * second
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full(c0.shape, 0x9E3779B9, tl.uint32)
        k1 += tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    return c0, c1


@triton.jit
def uniform(word):
    """The number in (0, 1) that a word stands for, float64."""
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def exponential(word):
    """The exponential that a word stands for, float32."""
    return (-tl.log(1.0 - uniform(word))).to(tl.float32)


@triton.jit
def block_noise(block, position, seed_low, seed_high):
    """As noise.block_noise: the smallest E of the block's tokens, float32, and the int32 id of the token that has it."""
    word, owner = philox(block, position, _STREAM_BLOCK, seed_low, seed_high)
    smallest = exponential(word) * (1.0 / BLOCK_SIZE)
    return smallest, block * BLOCK_SIZE + (owner >> _OWNER_SHIFT).to(tl.int32)


@triton.jit
def token_noise(token, smallest, owner, position, seed_low, seed_high):
    """E of tokens int32, float32; smallest and owner: block_noise of their blocks, broadcast to them."""
    word, _ = philox(token, position, _STREAM_TOKEN, seed_low, seed_high)
    return tl.where(token == owner, smallest, smallest + exponential(word))


@triton.jit
def decision(position, seed_low, seed_high):
    """As noise.uniform_noise: float64 in (0, 1), for scalars."""
    word, _ = philox(tl.zeros_like(position), position, _STREAM_DECIDE, seed_low, seed_high)
    return uniform(word)
