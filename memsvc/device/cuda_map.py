"""Worker side: an arena on a CUDA device as a tensor."""

import weakref
from contextlib import ExitStack

import torch

from memsvc import cuda_driver
from memsvc.arena_client import FetchedArena
from memsvc.cuda_driver import CudaDevice, CudaError


def map_cuda(fetched: FetchedArena, device: torch.device) -> torch.Tensor:
    """The memory as uint8 [num_bytes] on its device; unmapped when the tensor and its last view are gone.

    Raises ValueError naming both devices if device has a number and is another one, or if the memory can't be mapped.
    """
    found = cuda_driver.device_of_uuid(fetched.device_uuid)
    if device.index not in (None, found.ordinal):
        raise ValueError(f"the arena lies on {found}, the worker is to run on {_named(str(device))}")
    _make_context(found.ordinal)
    try:
        address = _map_memory(fetched.fd, fetched.num_bytes, found.ordinal)
    except CudaError as error:
        raise ValueError(f"the arena of {fetched.num_bytes} bytes cannot be mapped on {found}: {error}") from error
    return _tensor(_Mapping(address, fetched.num_bytes, found))


def _named(name: str) -> str:
    """A device that is asked for, as find_device knows it if it is there."""
    try:
        return str(cuda_driver.find_device(name))
    except ValueError:
        return f"{name}, which is not there"


def _map_memory(fd: int, num_bytes: int, ordinal: int) -> int:
    """The address of the memory behind fd. Nothing is kept if a call fails."""
    handle = cuda_driver.import_memory(fd)
    try:
        with ExitStack() as undo:
            address = cuda_driver.reserve_addresses(num_bytes)
            undo.callback(cuda_driver.free_addresses, address, num_bytes)
            cuda_driver.map_memory(address, num_bytes, handle)
            undo.callback(cuda_driver.unmap_memory, address, num_bytes)
            cuda_driver.allow_access(address, num_bytes, ordinal)
            undo.pop_all()
    finally:
        # The mapping keeps the memory.
        cuda_driver.release_memory(handle)
    return address


class _Mapping:
    """Mapped memory as CUDA arrays are shown to each other; a tensor over it keeps it alive.

    That interface has no bfloat16: it shows bytes, which views then read as anything.
    """

    def __init__(self, address: int, num_bytes: int, device: CudaDevice) -> None:
        self.device = device
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        # Not at the end of the process: the driver gives everything back then, and may be gone already.
        weakref.finalize(self, _unmap, address, num_bytes, device.ordinal).atexit = False


def _unmap(address: int, num_bytes: int, ordinal: int) -> None:
    _finish(ordinal)
    cuda_driver.unmap_memory(address, num_bytes)
    cuda_driver.free_addresses(address, num_bytes)


def _make_context(ordinal: int) -> None:
    """Torch's context, which is the device's primary one, before the driver is asked to map anything into it."""
    torch.empty(1, device=f"cuda:{ordinal}")


def _finish(ordinal: int) -> None:
    """Kernels that were submitted may still use what is about to be unmapped."""
    torch.cuda.synchronize(ordinal)


def _tensor(mapping: _Mapping) -> torch.Tensor:
    return torch.as_tensor(mapping, device=f"cuda:{mapping.device.ordinal}")
