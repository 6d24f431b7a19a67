"""DFlash2's local convolution: each row of a block mixes with the rows before it, by weights made from the row."""

from dataclasses import dataclass

import torch

from memsvc.device.layers import Linear


@dataclass(frozen=True, slots=True)
class LocalConv:
    """The convolution around one sublayer: `prepare` its input, `finish` its output.

    Rows lie as [n, B, H]: B rows per request, and the block's first row sees zeros before it. Nothing
    is kept between calls.
    """

    base_kernel: torch.Tensor
    """[2, S, H]: side (0 input, 1 output), tap (0 the row itself, 1 the row before it), channel."""
    projection: Linear
    """H -> 2 * S * G: makes the taps that depend on the row, one per group of H / G channels."""

    def prepare(self, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sublayer's input u [n, B, H], convolved, and the output side's taps [n, B, S, H] for finish."""
        n, num_rows, width = u.shape
        num_sides, num_taps, _ = self.base_kernel.shape
        dynamic = self.projection(u.flatten(0, 1)).view(n, num_rows, num_sides, num_taps, -1, 1)
        base = self.base_kernel.view(num_sides, num_taps, dynamic.shape[4], -1)
        taps = (base + dynamic).view(n, num_rows, num_sides, num_taps, width)
        return finish(u, taps[:, :, 0]), taps[:, :, 1]


def finish(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """x [n, B, H] convolved with taps [n, B, S, H]: row j is the sum over t <= j of taps[j, t] * x[j - t]."""
    out = taps[:, :, 0] * x
    for tap in range(1, min(taps.shape[2], x.shape[1])):
        out[:, tap:].addcmul_(taps[:, tap:, tap], x[:, :-tap])
    return out
