"""The noise is a format: known answers, equal bits in numpy and torch, and the right distribution."""

import math

import numpy as np
import pytest
import torch

from memsvc.device.noise import (
    BLOCK_SIZE,
    _exponential,
    _exponential_torch,
    block_noise,
    exponential_noise,
    exponential_noise_torch,
    philox,
    philox_torch,
    seed_words,
    uniform_noise,
)

# Published with the generator (Random123, kat_vectors, philox4x32 10 rounds): counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: tuple, key: tuple, want: tuple) -> None:
    assert tuple(int(word) for word in philox(counter, key)) == want
    words = philox_torch(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in words) == want


def test_numpy_and_torch_agree_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (40, 1), generator=generator)
    positions = torch.randint(0, 2**31, (40, 1), generator=generator)
    ids = torch.randint(0, 250_000, (40, 300), generator=generator)
    low, high = seed_words([seed % 2**64 for seed in seeds[:, 0].tolist()])
    want = exponential_noise((low[:, None], high[:, None]), positions.numpy(), ids.numpy())
    got = exponential_noise_torch(seeds, positions, ids)
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy(), want)


def plain_philox(counter: list[int], seed: int) -> list[int]:
    """The generator in whole numbers, one call at a time."""
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [b >> 32 ^ counter[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def plain_noise(seed: int, position: int, token: int) -> np.float32:
    """The layout of the noise as its module describes it, word by word."""
    first, second, *_ = plain_philox([token // 256, position, 0, 0], seed)
    smallest = np.float32(-math.log1p(-(first + 0.5) / 2**32)) / np.float32(256)
    if second >> 24 == token % 256:
        return smallest
    return smallest + np.float32(-math.log1p(-(plain_philox([token, position, 1, 0], seed)[0] + 0.5) / 2**32))


def test_the_layout_is_as_described() -> None:
    seed, ids = 0xFEDCBA9876543210, [0, 3, 255, 256, 5000, 151_935]
    want = [plain_noise(seed, 1_000_000, token) for token in ids]
    assert exponential_noise(seed_words([seed]), 1_000_000, ids).tolist() == [float(value) for value in want]
    owner = int(block_noise(seed_words([seed]), 8, [12])[1][0])
    assert exponential_noise(seed_words([seed]), 8, [owner])[0] == plain_noise(seed, 8, owner)
    assert uniform_noise(seed_words([seed]), 77)[0] == (plain_philox([0, 77, 2, 0], seed)[0] + 0.5) / 2**32


def test_the_format_has_not_changed() -> None:
    noise = exponential_noise(seed_words([0x0123456789ABCDEF]), 77, [0, 1, 255, 256, 49151])
    assert [value.hex() for value in noise.astype(float)] == [
        "0x1.0f5d620000000p-1",
        "0x1.62ebec0000000p+0",
        "0x1.54d5c80000000p-1",
        "0x1.3529c80000000p+0",
        "0x1.346e460000000p-4",
    ]
    assert uniform_noise(seed_words([5]), 9)[0] == 0.13426612631883472


def test_a_token_s_noise_does_not_depend_on_what_else_is_drawn() -> None:
    key = seed_words([42])
    every = exponential_noise(key, 3, np.arange(1000))
    assert np.array_equal(every[[999, 0, 513]], exponential_noise(key, 3, [999, 0, 513]))


@pytest.mark.parametrize("change", ["seed", "position", "token"])
def test_noise_changes_with_each_part_of_its_key(change: str) -> None:
    base = exponential_noise(seed_words([1 << 40]), 10, np.arange(512))
    other = {
        "seed": lambda: exponential_noise(seed_words([(1 << 40) + (1 << 32)]), 10, np.arange(512)),
        "position": lambda: exponential_noise(seed_words([1 << 40]), 11, np.arange(512)),
        "token": lambda: exponential_noise(seed_words([1 << 40]), 10, np.arange(512) + 512),
    }[change]()
    assert not (base == other).any()
    assert abs(np.corrcoef(base, other)[0, 1]) < 0.15


def test_noise_is_exponential_and_independent_within_a_block() -> None:
    positions = np.arange(400, dtype=np.uint64)[:, None]
    noise = exponential_noise(seed_words([9]), positions, np.arange(BLOCK_SIZE)).astype(float)
    # If E is exponential with mean 1, exp(-E) is uniform: chi-square over 64 cells, 63 degrees of freedom.
    counts = np.bincount((np.exp(-noise) * 64).astype(int).clip(0, 63).ravel(), minlength=64)
    expected = noise.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4 * np.sqrt(2 * 63)
    correlation = np.corrcoef(noise.T)[np.triu_indices(BLOCK_SIZE, 1)]
    assert abs(correlation.mean()) < 4 / np.sqrt(400 * len(correlation))
    assert abs(correlation).max() < 6 / np.sqrt(400)


def test_the_first_level_bounds_its_block_and_names_who_is_smallest() -> None:
    key = seed_words([3])
    for block in (0, 7):
        smallest, owner = block_noise(key, 5, [block])
        noise = exponential_noise(key, 5, np.arange(BLOCK_SIZE) + block * BLOCK_SIZE)
        assert noise.min() == smallest[0]
        assert noise.argmin() + block * BLOCK_SIZE == owner[0]
        assert (noise > smallest[0]).sum() == BLOCK_SIZE - 1


def test_the_extreme_words_give_finite_positive_noise() -> None:
    words = np.array([0, 1, 0xFFFFFFFF], dtype=np.uint64)
    low, _, high = _exponential(words)
    assert 0 < low < 2**-32
    assert np.isfinite(high)
    assert high > 22
    assert np.array_equal(_exponential_torch(torch.tensor([0, 1, 0xFFFFFFFF])).numpy(), _exponential(words))


def test_uniforms_lie_inside_the_unit_interval_and_average_to_half() -> None:
    values = uniform_noise(seed_words([11]), np.arange(2000, dtype=np.uint64))
    assert 0 < values.min() < 0.01
    assert 0.99 < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.03
