"""The local convolution against its definition, row by row and channel by channel."""

import pytest
import torch

from draft_worker.conv import LocalConv, finish
from memsvc.device.layers import Linear

WIDTH, GROUP = 12, 3


def conv(num_taps: int) -> LocalConv:
    generator = torch.Generator().manual_seed(num_taps)
    num_rows = 2 * num_taps * (WIDTH // GROUP)
    return LocalConv(
        torch.randn(2, num_taps, WIDTH, generator=generator), Linear(torch.randn(num_rows, WIDTH, generator=generator))
    )


def by_hand(layer: LocalConv, side: int, source: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x [B, H] convolved by taps made from source [B, H]; rows of the projection run side, tap, group."""
    num_taps, num_groups = layer.base_kernel.shape[1], WIDTH // GROUP
    out = torch.zeros_like(x)
    for j in range(len(x)):
        dynamic = layer.projection.weight @ source[j]
        for tap in range(num_taps):
            if j - tap < 0:
                continue
            for channel in range(WIDTH):
                row = (side * num_taps + tap) * num_groups + channel // GROUP
                out[j, channel] += (layer.base_kernel[side, tap, channel] + dynamic[row]) * x[j - tap, channel]
    return out


@pytest.mark.parametrize("num_taps", [1, 2, 3])
def test_both_sides_follow_the_definition_for_every_block(num_taps):
    layer = conv(num_taps)
    u, y = torch.randn(3, 5, WIDTH), torch.randn(3, 5, WIDTH)
    prepared, taps = layer.prepare(u)
    finished = finish(y, taps)
    for block in range(3):
        torch.testing.assert_close(prepared[block], by_hand(layer, 0, u[block], u[block]))
        torch.testing.assert_close(finished[block], by_hand(layer, 1, u[block], y[block]))


def test_a_block_starts_from_zeros_whatever_stands_before_it():
    layer = conv(2)
    u = torch.randn(2, 4, WIDTH)
    together, _ = layer.prepare(u)
    alone, _ = layer.prepare(u[1:])
    assert torch.equal(together[1:], alone)
    assert not torch.equal(together[1, 1], by_hand(layer, 0, u[1, 1:], u[1, 1:])[0]), "row 1 must see row 0"


def test_a_block_shorter_than_the_kernel_runs():
    layer = conv(3)
    u = torch.randn(1, 2, WIDTH)
    torch.testing.assert_close(layer.prepare(u)[0][0], by_hand(layer, 0, u[0], u[0]))


def test_the_identity_kernel_changes_nothing():
    base = torch.zeros(2, 2, WIDTH)
    base[:, 0] = 1
    layer = LocalConv(base, Linear(torch.zeros(2 * 2 * (WIDTH // GROUP), WIDTH)))
    u, y = torch.randn(2, 4, WIDTH), torch.randn(2, 4, WIDTH)
    prepared, taps = layer.prepare(u)
    assert torch.equal(prepared, u)
    assert torch.equal(finish(y, taps), y)
