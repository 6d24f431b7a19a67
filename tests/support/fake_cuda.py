"""The CUDA driver and NVML as memsvc.cuda_driver calls them, over plain files: records calls, fails on demand.

Memory of a device is a memfd, so whoever maps it through the fake sees the same bytes. `held` says what was taken
and not given back.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from types import SimpleNamespace
from typing import Any

UNIT = 2 << 20
GIB = 1 << 30


class CUresult(IntEnum):
    """Those that the tests use."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_UNKNOWN = 999


@dataclass
class FakeDevice:
    """One card."""

    uuid: bytes
    name: str = "Fake H200"
    total: int = 8 * GIB
    free: int = 7 * GIB


class NVMLError(Exception):
    """As pynvml has it."""


@dataclass
class FakeCuda:
    """Stands for both modules. fail maps the name of a call to its status, or to an exception."""

    devices: list[FakeDevice] = field(default_factory=lambda: [FakeDevice(bytes(range(16))), FakeDevice(b"\xaa" * 16)])
    fail: dict[str, CUresult | Exception] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """Modules that are not installed."""
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    reserved: dict[int, int] = field(default_factory=dict)
    mapped: dict[int, mmap.mmap] = field(default_factory=dict)
    accessible: dict[int, int] = field(default_factory=dict)
    """Address to the ordinal of the device that may use it."""

    def __post_init__(self) -> None:
        self._handles: dict[int, int] = {}
        self._numbers = count(1)

    @property
    def held(self) -> tuple[int, int, int]:
        """Handles, address ranges and mappings that somebody has."""
        return len(self._handles), len(self.reserved), len(self.mapped)

    @property
    def names(self) -> list[str]:
        """Of all calls."""
        return [call[0] for call in self.calls]

    def module(self, name: str, package: str) -> Any:
        """In the stead of cuda_driver._module."""
        if name in self.missing:
            raise ValueError(f"a CUDA device needs the package {package}, which is not installed")
        return _Driver(self) if name == "cuda.bindings.driver" else _Nvml(self)

    def close(self) -> None:
        """Give all descriptors back."""
        for fd in self._handles.values():
            os.close(fd)

    def cuInit(self, flags: int) -> None:
        assert flags == 0

    def cuDeviceGetCount(self) -> int:
        return len(self.devices)

    def cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def cuDeviceGetName(self, length: int, device: int) -> bytes:
        # What lies behind the name's end is not defined.
        return (self.devices[device].name.encode() + b"\0").ljust(length, b" ")

    def cuDeviceGetUuid(self, device: int) -> Any:
        return SimpleNamespace(bytes=self.devices[device].uuid)

    def cuMemGetAllocationGranularity(self, properties: Any, option: str) -> int:
        assert option == "recommended"
        return UNIT

    def cuMemCreate(self, num_bytes: int, properties: Any, flags: int) -> int:
        device = self.devices[properties.location.id]
        assert (properties.type, properties.location.type, properties.requestedHandleTypes) == (
            "pinned",
            "device",
            "fd",
        )
        assert num_bytes % UNIT == 0
        assert flags == 0
        if num_bytes > device.free:
            raise _Status(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        fd = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return self._add(fd)

    def cuMemExportToShareableHandle(self, handle: int, kind: str, flags: int) -> int:
        assert (kind, flags) == ("fd", 0)
        return os.dup(self._handles[handle])

    def cuMemImportFromShareableHandle(self, fd: int, kind: str) -> int:
        assert kind == "fd"
        return self._add(os.dup(fd))

    def cuMemRelease(self, handle: int) -> None:
        os.close(self._handles.pop(handle))

    def cuMemAddressReserve(self, num_bytes: int, alignment: int, address: int, flags: int) -> int:
        assert (num_bytes % UNIT, alignment, address, flags) == (0, 0, 0, 0)
        first = next(self._numbers) << 40
        self.reserved[first] = num_bytes
        return first

    def cuMemAddressFree(self, address: int, num_bytes: int) -> None:
        assert address not in self.mapped
        assert self.reserved.pop(address) == num_bytes

    def cuMemMap(self, address: int, num_bytes: int, offset: int, handle: int, flags: int) -> None:
        assert (self.reserved[address], offset, flags) == (num_bytes, 0, 0)
        self.mapped[address] = mmap.mmap(self._handles[handle], num_bytes)

    def cuMemUnmap(self, address: int, num_bytes: int) -> None:
        assert self.reserved[address] == num_bytes
        del self.mapped[address]
        self.accessible.pop(address, None)

    def cuMemSetAccess(self, address: int, num_bytes: int, descriptors: list[Any], num: int) -> None:
        (access,) = descriptors
        assert (access.location.type, access.flags, num) == ("device", "read and write", 1)
        assert len(self.mapped[address]) == num_bytes
        self.accessible[address] = access.location.id

    def cuStreamWaitValue32(self, stream: int, address: int, value: int, flags: int) -> None:
        assert flags == 0

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> None:
        assert flags == 0

    def _add(self, fd: int) -> int:
        handle = next(self._numbers)
        self._handles[handle] = fd
        return handle


class _Status(Exception):
    def __init__(self, status: CUresult) -> None:
        self.status = status


class _Driver:
    """cuda.bindings.driver: every call answers (status, what it gives out)."""

    CUresult = CUresult
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR="fd")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="read and write")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended")
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        call = getattr(self._fake, name)

        def answer(*arguments: Any) -> tuple[Any, ...]:
            self._fake.calls.append((name, *arguments))
            status = self._fake.fail.get(name)
            if isinstance(status, Exception):
                raise status
            if status:
                return (status, None)
            try:
                value = call(*arguments)
            except _Status as failed:
                return (failed.status, None)
            return (CUresult.CUDA_SUCCESS,) if value is None else (CUresult.CUDA_SUCCESS, value)

        return answer


class _Nvml:
    NVMLError = NVMLError

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake

    def nvmlInit(self) -> None:
        failure = self._fake.fail.get("nvmlInit")
        if isinstance(failure, Exception):
            raise failure

    def nvmlShutdown(self) -> None:
        """Nothing to do."""

    def nvmlDeviceGetHandleByUUID(self, text: str) -> FakeDevice:
        assert text.startswith("GPU-")
        wanted = bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))
        return next(device for device in self._fake.devices if device.uuid == wanted)

    def nvmlDeviceGetMemoryInfo(self, device: FakeDevice) -> Any:
        return SimpleNamespace(free=device.free, total=device.total)
