"""The service's side of an arena on a CUDA device, against a made-up driver: sizes, refusals, and nothing left over."""

import os
from collections.abc import Callable, Iterator

import pytest

from memsvc import __main__ as service
from memsvc import cuda_driver
from memsvc.cuda_arena import CudaArena, check_room
from memsvc.cuda_driver import CudaError, find_device, memory_info, num_devices, uuid_text
from tests.support.fake_cuda import GIB, UNIT, CUresult, FakeCuda, NVMLError

FIRST = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
SECOND = "GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setattr(cuda_driver, "_module", fake.module)
    yield fake
    fake.close()


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    return str(caught.value)


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("name", "ordinal"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), (SECOND, 1), (SECOND.upper(), 1), (FIRST, 0)]
)
def test_a_device_is_named_by_number_or_uuid(fake: FakeCuda, name: str, ordinal: int) -> None:
    device = find_device(name)
    assert (device.ordinal, device.uuid, device.name) == (ordinal, fake.devices[ordinal].uuid, "Fake H200")
    assert uuid_text(device.uuid) in str(device)


def test_a_device_that_is_not_there_is_refused_with_those_that_are(fake: FakeCuda) -> None:
    assert "this process sees 2 CUDA devices" in refusal(lambda: find_device("cuda:2"))
    unknown = refusal(lambda: find_device("GPU-00000000-0000-0000-0000-000000000001"))
    assert FIRST in unknown
    assert SECOND in unknown
    assert "'gpu'" in refusal(lambda: find_device("gpu"))
    fake.fail["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    assert num_devices() == 0
    assert "sees 0 CUDA devices" in refusal(lambda: find_device("cuda"))


def test_missing_packages_and_a_missing_driver_are_named(fake: FakeCuda) -> None:
    fake.fail["cuInit"] = RuntimeError("Failed to dlopen libcuda.so.1")
    assert "libcuda.so.1" in refusal(lambda: CudaArena("cuda", UNIT))
    fake.missing = ("cuda.bindings.driver",)
    assert "cuda-bindings" in refusal(lambda: CudaArena("cuda", UNIT))
    fake.missing = ("pynvml",)
    assert "nvidia-ml-py" in refusal(lambda: memory_info(fake.devices[0].uuid))


def test_a_package_that_cannot_be_imported_is_named_by_what_pip_calls_it() -> None:
    assert "needs the package some-package" in refusal(
        lambda: cuda_driver._module("no_such_module_at_all", "some-package")
    )


def test_nvml_that_fails_is_told(fake: FakeCuda) -> None:
    fake.fail["nvmlInit"] = NVMLError("driver not loaded")
    told = refusal(lambda: memory_info(fake.devices[0].uuid))
    assert FIRST in told
    assert "driver not loaded" in told


@pytest.mark.parametrize(("asked", "given"), [(1, UNIT), (UNIT, UNIT), (UNIT + 1, 2 * UNIT)])
def test_the_size_is_rounded_up_to_what_the_device_gives_out(fake: FakeCuda, asked: int, given: int) -> None:
    assert check_room("cuda:1", asked) == given
    arena = CudaArena("cuda:1", asked)
    assert (arena.num_bytes, arena.device_uuid) == (given, fake.devices[1].uuid)
    assert os.fstat(arena.fd).st_size == given
    assert not os.get_inheritable(arena.fd)
    arena.close()
    assert fake.held == (0, 0, 0)


def test_the_service_maps_nothing_and_makes_no_context(fake: FakeCuda) -> None:
    arena = CudaArena("cuda", UNIT)
    arena.check()
    arena.close()
    used = {"cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid"}
    used |= {"cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemRelease"}
    assert set(fake.names) == used


def test_too_large_an_arena_is_refused_with_the_numbers(fake: FakeCuda) -> None:
    numbers = f"needs {8 * GIB} bytes, {7 * GIB} of {8 * GIB} bytes of cuda:0 (Fake H200, {FIRST}) are free"
    assert numbers in refusal(lambda: check_room("cuda", 8 * GIB, wait_s=0.0))
    told = refusal(lambda: CudaArena("cuda", 8 * GIB))
    assert numbers in told
    assert "CUDA_ERROR_OUT_OF_MEMORY" in told
    assert fake.held == (0, 0, 0)


def test_memory_that_a_dead_process_held_is_waited_for(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def look(_seconds: float) -> None:
        looks.append(fake.devices[0].free)
        fake.devices[0].free += GIB

    monkeypatch.setattr("memsvc.cuda_arena.time.sleep", look)
    fake.devices[0].free = GIB
    assert check_room("cuda", 3 * GIB) == 3 * GIB
    assert looks == [GIB, 2 * GIB]


@pytest.mark.parametrize("call", ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"])
def test_a_call_that_fails_leaves_nothing_behind(fake: FakeCuda, call: str) -> None:
    before = num_fds()
    fake.fail[call] = CUresult.CUDA_ERROR_UNKNOWN
    assert f"{call}: CUDA_ERROR_UNKNOWN" in refusal(lambda: CudaArena("cuda", UNIT))
    assert fake.held == (0, 0, 0)
    assert num_fds() == before


def test_a_lost_device_is_found_when_the_memory_is_asked_for(fake: FakeCuda) -> None:
    arena = CudaArena("cuda", UNIT)
    before = num_fds()
    arena.check()
    assert num_fds() == before
    fake.fail["cuMemExportToShareableHandle"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="cuMemExportToShareableHandle: CUDA_ERROR_ILLEGAL_ADDRESS"):
        arena.check()
    fake.fail["cuMemRelease"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    arena.close()


def test_the_words_are_waited_for_and_written_as_32_bits(fake: FakeCuda) -> None:
    cuda_driver.stream_wait(5, 0x1000, 7)
    cuda_driver.stream_write(5, 0x1080, (1 << 32) + 3)
    assert fake.calls == [("cuStreamWaitValue32", 5, 0x1000, 7, 0), ("cuStreamWriteValue32", 5, 0x1080, 3, 0)]


def test_the_service_ends_with_a_lost_device_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(*_arguments: object) -> None:
        raise CudaError("cuMemExportToShareableHandle", "CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(service, "_run", lose)
    monkeypatch.setattr(service, "setup_logging", lambda *_: None)
    monkeypatch.setattr(service, "install_sigterm", lambda _: None)
    assert service.main(["--run-dir", "d", "--arena-bytes", "1M", "--kind", "target_kv:1K:16"]) == 1
    assert "the device's memory is lost: cuMemExportToShareableHandle: CUDA_ERROR_UNKNOWN" in caplog.text
