"""The arena on a CUDA device: made by the service, mapped by the workers, touched by kernels of theirs alone.

The service keeps a handle and a descriptor, never a mapping or a context, so an error of a worker's kernel does not
reach it, and the memory outlives the worker. As with the CPU's arena, nothing stays behind the last process that
holds it.
"""

import logging
import os
import time

from memsvc import cuda_driver
from memsvc.cuda_driver import CudaDevice, CudaError

logger = logging.getLogger(__name__)

RECLAIM_S = 5.0
"""What a process that has just ended held on the device may come back late: a restart waits at most so long for it."""
_LOOK_S = 0.1


class CudaArena:
    """num_bytes of a device's memory, rounded up to what the device gives out, behind a descriptor.

    Its contents are not defined at the start.
    """

    def __init__(self, device: str, num_bytes: int) -> None:
        """device: cuda, cuda:N or GPU-UUID. Raises ValueError, with the numbers, if it or the bytes are not there."""
        self.device, self.num_bytes = _placed(device, num_bytes)
        self.device_uuid = self.device.uuid
        try:
            self._handle = cuda_driver.create_memory(self.device.ordinal, self.num_bytes)
        except CudaError as error:
            raise ValueError(f"{_need(self.device, self.num_bytes)}; the driver says: {error}") from error
        try:
            self.fd = cuda_driver.export_memory(self._handle)
        except CudaError as error:
            cuda_driver.release_memory(self._handle)
            raise ValueError(f"memory of {self.device} cannot be shared: {error}") from error
        os.set_inheritable(self.fd, False)

    def check(self) -> None:
        """Ask the driver whether the memory can still be handed out. Raises CudaError if not: the service is over."""
        os.close(cuda_driver.export_memory(self._handle))

    def close(self) -> None:
        """Let go of the memory; it lives on in processes that have mapped it."""
        os.close(self.fd)
        try:
            cuda_driver.release_memory(self._handle)
        except CudaError as error:
            # On the way out, and often because of the same error: the end of the process gives the memory back.
            logger.warning("arena release failed error=%s", error)


def check_room(device: str, num_bytes: int, wait_s: float = RECLAIM_S) -> int:
    """The bytes that an arena of num_bytes will have. Raises ValueError with the numbers if fewer are free.

    Waits up to wait_s for them, as memory of a process that has ended may be on its way back.
    """
    found, rounded = _placed(device, num_bytes)
    deadline = time.monotonic() + wait_s
    while cuda_driver.memory_info(found.uuid)[0] < rounded:
        if time.monotonic() >= deadline:
            raise ValueError(_need(found, rounded))
        time.sleep(_LOOK_S)
    return rounded


def _placed(device: str, num_bytes: int) -> tuple[CudaDevice, int]:
    found = cuda_driver.find_device(device)
    try:
        unit = cuda_driver.granularity(found.ordinal)
    except CudaError as error:
        raise ValueError(f"{found} gives out no memory that can be shared: {error}") from error
    return found, -(-num_bytes // unit) * unit


def _need(device: CudaDevice, num_bytes: int) -> str:
    free, total = cuda_driver.memory_info(device.uuid)
    return f"the arena needs {num_bytes} bytes, {free} of {total} bytes of {device} are free"
