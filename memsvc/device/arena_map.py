"""Worker side: the arena as one flat tensor of bytes."""

import mmap
import os

import torch

from memsvc.arena_client import fetch_arena


def map_arena(fd_endpoint: str, arena_bytes: int, device: str = "cpu") -> torch.Tensor:
    """The arena as uint8 [arena_bytes], the same memory in every process that maps it.

    fd_endpoint and arena_bytes come from Registered. The mapping lives as long as the tensor or a
    view of it. Raises ValueError on a device other than the CPU or on an arena of another size.
    """
    if torch.device(device).type != "cpu":
        raise ValueError(f"device {device!r}: this service's arena is CPU memory, only 'cpu' can map it")
    fd, num_bytes = fetch_arena(fd_endpoint)
    try:
        if num_bytes != arena_bytes:
            raise ValueError(f"the arena at {fd_endpoint} has {num_bytes} bytes, the layout says {arena_bytes}")
        mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    return torch.frombuffer(mapping, dtype=torch.uint8)
