"""Code under test in which the host must not wait for the device: torch raises if it does."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def never_waits() -> Iterator[None]:
    """Inside, whatever makes the host wait for the CUDA device is a RuntimeError, as far as torch notices it."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            # Said by the first call of the process, which as an error would leave the mode set for all later tests.
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
