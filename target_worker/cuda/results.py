"""What a step gave, on its way from the device to the host: one copy a part, and an event."""

import math
from collections.abc import Callable, Sequence

import torch

from memsvc.device.kernels.accept import RESULT_EXTRA


class ResultBuffer:
    """Pinned memory that the results of one step are copied to: rows (number, done, tokens) of kernels.accept.

    It may be taken again once `read` has returned.
    """

    def __init__(self, max_numbers: int, device: torch.device | str) -> None:
        """max_numbers: int32 of all parts of a step together."""
        is_cuda = torch.device(device).type == "cuda"
        self._numbers = torch.zeros(max_numbers, dtype=torch.int32, pin_memory=is_cuda)
        self._arrived = torch.cuda.Event() if is_cuda else None
        self._forms: list[torch.Size] = []

    def take(self, parts: Sequence[torch.Tensor]) -> None:
        """Enqueue copies of parts int32 [n, 2 + tokens], contiguous, behind what is on the current stream."""
        self._forms = [part.shape for part in parts]
        start = 0
        for part in parts:
            self._numbers[start : start + part.numel()].copy_(part.view(-1), non_blocking=True)
            start += part.numel()
        if self._arrived is not None:
            self._arrived.record()

    def read(self, wait: Callable[[Callable[[], bool]], None]) -> list[list[int]]:
        """The tokens of each row of all parts, in order. wait returns once the function given to it says True."""
        if self._arrived is not None:
            wait(self._arrived.query)
        rows, start = [], 0
        for form in self._forms:
            size = math.prod(form)
            rows += self._numbers[start : start + size].view(form).tolist()
            start += size
        return [row[RESULT_EXTRA : RESULT_EXTRA + row[0]] for row in rows]
