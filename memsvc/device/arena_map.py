"""Worker side: the arena as one flat tensor of bytes."""

import mmap
import os

import torch

from memsvc.arena_client import CPU_MEMORY, FetchedArena, fetch_arena
from memsvc.cuda_driver import uuid_text
from memsvc.device.cuda_map import map_cuda


def map_arena(fd_endpoint: str, arena_bytes: int, device: str = "cpu") -> torch.Tensor:
    """The arena as uint8 [arena_bytes], the same memory in every process that maps it.

    fd_endpoint and arena_bytes come from Registered. device: cpu, cuda:N, or cuda for the device that the arena
    lies on, whatever number that has here; the tensor says which. The mapping lives as long as the tensor or a
    view of it. Map a device's arena before anything is captured in a graph. Raises ValueError on another device than
    the arena's, on an arena of another size, and if a device's memory cannot be mapped.
    """
    fetched = fetch_arena(fd_endpoint)
    try:
        if fetched.num_bytes != arena_bytes:
            raise ValueError(f"the arena at {fd_endpoint} has {fetched.num_bytes} bytes, the layout says {arena_bytes}")
        return _map(fetched, torch.device(device))
    finally:
        os.close(fetched.fd)


def _map(fetched: FetchedArena, device: torch.device) -> torch.Tensor:
    lies_on = "CPU memory" if fetched.device_uuid == CPU_MEMORY else f"on CUDA device {uuid_text(fetched.device_uuid)}"
    match device.type, fetched.device_uuid == CPU_MEMORY:
        case "cpu", True:
            mapping = mmap.mmap(fetched.fd, fetched.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            return torch.frombuffer(mapping, dtype=torch.uint8)
        case "cuda", False:
            return map_cuda(fetched, device)
        case _:
            raise ValueError(f"this service's arena is {lies_on}; the worker is to run on device {str(device)!r}")
