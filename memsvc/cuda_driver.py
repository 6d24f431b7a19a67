"""The CUDA driver calls behind the arena and the hand-over words, as functions that raise on any status but success.

No torch. The packages are imported at the first call, so a service on the CPU needs none of them. None of the calls
that the memory service makes needs a context: one would take half a gigabyte of the device, and an error of a kernel
that stays with a context would end its owner too.
"""

import importlib
import re
import uuid as uuids
from dataclasses import dataclass
from typing import Any

_DEVICE_NAME = re.compile(r"cuda(?::(\d+))?")
_UUID_NAME = re.compile(r"(?:cuda:)?GPU-([0-9a-f-]{36})", re.IGNORECASE)
_NOT_THERE = ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE")


class CudaError(Exception):
    """A driver call failed. Some statuses stay until the process ends, so nobody should go on after one."""

    def __init__(self, call: str, status: str) -> None:
        super().__init__(f"{call}: {status}")
        self.call = call
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaDevice:
    """A device as this process numbers it; other processes may number it otherwise."""

    ordinal: int
    uuid: bytes
    """16 bytes that every process knows it by."""
    name: str

    def __str__(self) -> str:
        return f"cuda:{self.ordinal} ({self.name}, {uuid_text(self.uuid)})"


def uuid_text(uuid: bytes) -> str:
    """A device's UUID as nvidia-smi writes it."""
    return f"GPU-{uuids.UUID(bytes=uuid)}"


def find_device(name: str) -> CudaDevice:
    """The device called cuda (the first), cuda:N or GPU-UUID. Raises ValueError, with what is there, if it is not."""
    by_ordinal, by_uuid = _DEVICE_NAME.fullmatch(name), _UUID_NAME.fullmatch(name)
    if by_uuid is not None:
        return device_of_uuid(uuids.UUID(by_uuid[1]).bytes)
    if by_ordinal is None:
        raise ValueError(f"device {name!r} is none of cuda, cuda:N and GPU-UUID")
    ordinal, there = int(by_ordinal[1] or 0), num_devices()
    if ordinal >= there:
        raise ValueError(f"device {name!r} is not there: this process sees {there} CUDA devices")
    return _device(ordinal)


def device_of_uuid(uuid: bytes) -> CudaDevice:
    """The device with that UUID. Raises ValueError naming those that this process sees if it is none of them."""
    seen = [_device(ordinal) for ordinal in range(num_devices())]
    for device in seen:
        if device.uuid == uuid:
            return device
    known = ", ".join(map(str, seen)) or "none"
    raise ValueError(f"device {uuid_text(uuid)} is not there: this process sees {known}")


def num_devices() -> int:
    """CUDA devices that this process sees. Raises ValueError without cuda-bindings or a driver."""
    try:
        _call("cuInit", 0)
        return int(_call("cuDeviceGetCount"))
    except CudaError as error:
        if error.status in _NOT_THERE:
            return 0
        raise ValueError(f"no CUDA device can be used here: {error}") from error


def _device(ordinal: int) -> CudaDevice:
    handle = _call("cuDeviceGet", ordinal)
    # The name ends at the first zero byte; what lies behind it may be anything.
    name = bytes(_call("cuDeviceGetName", 128, handle)).partition(b"\0")[0].decode("utf-8", "replace").strip()
    return CudaDevice(ordinal=ordinal, uuid=bytes(_call("cuDeviceGetUuid", handle).bytes), name=name)


def memory_info(uuid: bytes) -> tuple[int, int]:
    """(free, total) bytes of a device, from NVML: the driver would tell only a process with a context on it.

    Raises ValueError without nvidia-ml-py, or if NVML does not know the device.
    """
    nvml = _module("pynvml", "nvidia-ml-py")
    try:
        nvml.nvmlInit()
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid_text(uuid)))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise ValueError(f"NVML tells no memory of device {uuid_text(uuid)}: {error}") from error
    return int(info.free), int(info.total)


def granularity(ordinal: int) -> int:
    """Memory of a device is created and mapped in multiples of so many bytes."""
    flag = _driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(_call("cuMemGetAllocationGranularity", _properties(ordinal), flag))


def create_memory(ordinal: int, num_bytes: int) -> int:
    """A handle of new memory that other processes can be given; num_bytes is a multiple of granularity.

    Its contents are not defined. It lives until the handle is released and nobody holds a descriptor or a mapping.
    """
    return int(_call("cuMemCreate", num_bytes, _properties(ordinal), 0))


def release_memory(handle: int) -> None:
    """Let go of a handle; mappings and descriptors keep the memory."""
    _call("cuMemRelease", handle)


def export_memory(handle: int) -> int:
    """A new file descriptor of the memory, to be sent to another process; the caller closes it."""
    return int(_call("cuMemExportToShareableHandle", handle, _posix_fd(), 0))


def import_memory(fd: int) -> int:
    """A handle of the memory behind a descriptor, which stays the caller's to close."""
    return int(_call("cuMemImportFromShareableHandle", fd, _posix_fd()))


def reserve_addresses(num_bytes: int) -> int:
    """The first of num_bytes addresses that nothing is mapped at."""
    return int(_call("cuMemAddressReserve", num_bytes, 0, 0, 0))


def free_addresses(address: int, num_bytes: int) -> None:
    """Give reserved addresses back, unmapped before."""
    _call("cuMemAddressFree", address, num_bytes)


def map_memory(address: int, num_bytes: int, handle: int) -> None:
    """Memory at reserved addresses; nobody may touch it before allow_access."""
    _call("cuMemMap", address, num_bytes, 0, handle, 0)


def unmap_memory(address: int, num_bytes: int) -> None:
    """Nothing may be running that uses these addresses."""
    _call("cuMemUnmap", address, num_bytes)


def allow_access(address: int, num_bytes: int, ordinal: int) -> None:
    """Kernels and copies of that device may read and write the mapped memory."""
    driver = _driver()
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _call("cuMemSetAccess", address, num_bytes, [access], 1)


def stream_wait(stream: int, address: int, value: int) -> None:
    """What is submitted to the stream from now on waits until the 32-bit word at address, less value, is not negative."""
    flag = _driver().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    _call("cuStreamWaitValue32", stream, address, value & 0xFFFFFFFF, int(flag))


def stream_write(stream: int, address: int, value: int) -> None:
    """The word at address becomes value once all work submitted to the stream before is done and visible."""
    _call("cuStreamWriteValue32", stream, address, value & 0xFFFFFFFF, 0)


def _properties(ordinal: int) -> Any:
    driver = _driver()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = _posix_fd()
    return properties


def _posix_fd() -> Any:
    return _driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _call(name: str, *arguments: Any) -> Any:
    """What the call gives out, None if nothing."""
    driver = _driver()
    try:
        status, *values = getattr(driver, name)(*arguments)
    except RuntimeError as error:
        # The bindings open the driver's library at the first call.
        raise CudaError(name, str(error)) from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(name, str(getattr(status, "name", status)))
    return values[0] if values else None


def _driver() -> Any:
    return _module("cuda.bindings.driver", "cuda-bindings")


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"a CUDA device needs the package {package}, which is not installed ({error}); the extra cuda of this project has it"
        ) from error
