"""Sampling noise that depends on (seed, position, token id) and on nothing else.

Target and draft draw from the same noise, so the layout below is a format: change it and every seed
gives other text, and a draft of another version loses its acceptance.

Hash: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011).
  key     = (seed mod 2^32, seed >> 32), the seed taken modulo 2^64
  counter = (index, position, stream, 0), each below 2^32
  stream 0  BLOCK    index = token id // 256: word 0 -> the block's smallest value, word 1 -> who has it
  stream 1  TOKEN    index = token id: word 0 -> the token's value above the block's smallest
  stream 2  DECIDE   index = 0: word 0 -> one uniform per position (simulated acceptance)
A word w stands for u = (w + 1/2) / 2^32, which in float64 is strictly inside (0, 1), and for the
exponential -log1p(-u), computed in float64 and rounded to float32.

The value E of a token is exponential with mean 1, independent over tokens, and built in two levels
so that a race over a whole vocabulary has to look at few tokens. The smallest of 256 independent
exponentials is an exponential divided by 256, it is anybody's with equal chance, and by lack of memory
the others lie above it by exponentials of their own. So with m = exp(BLOCK word 0) / 256 and
j = BLOCK word 1 >> 24:
  E = m                              for token 256 * block + j
  E = m + exp(TOKEN word 0)          for the others of the block (float32 addition)
and m bounds the whole block from below.

u, m's owner and every bit of the hash are equal in numpy and torch, on CPU and CUDA; E could differ in
its last bit where two log1p differ in float64 by enough to round differently.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

BLOCK_SIZE = 256
"""Tokens that share one draw of the first level."""

STREAM_BLOCK, STREAM_TOKEN, STREAM_DECIDE = 0, 1, 2

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Any, Any, Any, Any]
"""Four counter or output words: arrays of one backend, values in [0, 2^32)."""


def _mul_numpy(multiplier: int, x: Any) -> tuple[Any, Any]:
    """High and low 32 bits of the product; uint64 holds it."""
    product = x * np.uint64(multiplier)
    return product >> np.uint64(32), product & np.uint64(_MASK)


def _mul_int64(multiplier: int, x: Any) -> tuple[Any, Any]:
    """The same in int64, which a 64-bit product would overflow: in halves of 16 bits."""
    high, low = multiplier * (x >> 16), multiplier * (x & 0xFFFF)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def _rounds(counter: Words, key: tuple[Any, Any], mul: Callable[[int, Any], tuple[Any, Any]], mask: Any) -> Words:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = mul(_MULTIPLIERS[0], c0)
        high1, low1 = mul(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & mask, (k1 + _KEY_STEPS[1]) & mask
    return c0, c1, c2, c3


def philox(counter: Words, key: tuple[Any, Any]) -> Words:
    """Philox4x32-10 of uint64 arrays (broadcast against each other) that hold 32-bit words."""
    wide = tuple(np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    return _rounds((wide[0], wide[1], wide[2], wide[3]), (k0, k1), _mul_numpy, np.uint64(_MASK))


def philox_torch(counter: Words, key: tuple[Any, Any]) -> Words:
    """The same bits from int64 tensors, on any device."""
    return _rounds(counter, key, _mul_int64, _MASK)


def seed_words(seeds: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Key words of seeds: two uint64 arrays [n] with the low and the high 32 bits."""
    low = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    high = np.array([seed >> 32 & _MASK for seed in seeds], dtype=np.uint64)
    return low, high


def _exponential(words: np.ndarray) -> np.ndarray:
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log1p(-u)).astype(np.float32)


def _draw(key: tuple[Any, Any], position: Any, index: Any, stream: int) -> Words:
    index = np.asarray(index, dtype=np.uint64)
    return philox((index, position, np.uint64(stream), np.uint64(0)), key)


def block_noise(key: tuple[Any, Any], position: Any, block: Any) -> tuple[np.ndarray, np.ndarray]:
    """First level: the smallest E of the block's tokens (float32), and the id of the token that has it (int64).

    key is from seed_words; key, position and block broadcast. The id may lie past the vocabulary.
    """
    words = _draw(key, position, block, STREAM_BLOCK)
    smallest = _exponential(words[0]) * np.float32(1 / BLOCK_SIZE)
    owner = (words[1] >> np.uint64(24)).astype(np.int64)
    return smallest, np.asarray(block, dtype=np.int64) * BLOCK_SIZE + owner


def exponential_noise(key: tuple[Any, Any], position: Any, token_ids: Any) -> np.ndarray:
    """E of tokens, float32, in the broadcast shape of key (seed_words), position and token_ids."""
    token_ids = np.asarray(token_ids, dtype=np.int64)
    smallest, owner = block_noise(key, position, token_ids // BLOCK_SIZE)
    above = _exponential(_draw(key, position, token_ids, STREAM_TOKEN)[0])
    return np.where(owner == token_ids, smallest, smallest + above)


def uniform_noise(key: tuple[Any, Any], position: Any) -> np.ndarray:
    """One number in (0, 1) per key and position, float64, apart from the tokens' noise."""
    words = _draw(key, position, 0, STREAM_DECIDE)
    return (words[0].astype(np.float64) + 0.5) * 2.0**-32


def _exponential_torch(words: torch.Tensor) -> torch.Tensor:
    u = (words.double() + 0.5) * 2.0**-32
    return (-torch.log1p(-u)).float()


def exponential_noise_torch(seed: torch.Tensor, position: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """exponential_noise on a device: int64 tensors that broadcast (seeds as their signed 64 bits), E float32."""
    seed, position, token_ids = torch.broadcast_tensors(seed, position, token_ids)
    key = (seed & _MASK, seed >> 32 & _MASK)
    zero = torch.zeros_like(token_ids)
    block = token_ids // BLOCK_SIZE
    words = philox_torch((block, position, zero + STREAM_BLOCK, zero), key)
    smallest = _exponential_torch(words[0]) * (1 / BLOCK_SIZE)
    owner = block * BLOCK_SIZE + (words[1] >> 24)
    above = _exponential_torch(philox_torch((token_ids, position, zero + STREAM_TOKEN, zero), key)[0])
    return torch.where(owner == token_ids, smallest, smallest + above)
