"""The arena: one piece of memory, the same in every process, gone with the last of them; on the CPU and on a device."""

import fcntl
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memsvc import arena as arena_module
from memsvc.arena import Arena, available_bytes
from memsvc.arena_client import fetch_arena
from memsvc.cuda_driver import CudaError
from memsvc.device.arena_map import map_arena
from tests.support.arena_devices import arena_device, fake_cuda
from tests.support.fake_cuda import CUresult, FakeCuda
from tests.support.fake_manager import FakeManager
from tests.support.memsvc_thread import serving

__all__ = ["arena_device", "fake_cuda"]

ARENA_BYTES = 2 << 20
"""A device gives out no less."""


@pytest.fixture
def fd_endpoint(tmp_path: Path) -> Iterator[str]:
    """Of an arena in CPU memory."""
    with serving(FakeManager(), tmp_path, ARENA_BYTES):
        yield str(tmp_path / "arena.sock")


@pytest.fixture
def anywhere(tmp_path: Path, arena_device: str) -> Iterator[str]:
    """Of an arena on each device in turn."""
    with serving(FakeManager(), tmp_path, ARENA_BYTES, arena_device):
        yield str(tmp_path / "arena.sock")


def test_the_arena_in_cpu_memory_starts_zeroed(fd_endpoint: str):
    assert int(map_arena(fd_endpoint, ARENA_BYTES).sum()) == 0


def test_two_maps_are_the_same_bytes(anywhere: str, arena_device: str):
    first, second = (map_arena(anywhere, ARENA_BYTES, arena_device) for _ in range(2))
    assert (first.dtype, first.shape) == (torch.uint8, (ARENA_BYTES,))
    first.zero_()
    first[-1] = 17
    first.view(torch.bfloat16)[:2] = 1.5
    assert second[-1] == 17
    assert second.view(torch.bfloat16)[:2].tolist() == [1.5, 1.5]
    assert int(second.sum()) == 17 + 2 * (0xC0 + 0x3F)


def test_another_process_sees_what_is_written(fd_endpoint: str):
    tensor = map_arena(fd_endpoint, ARENA_BYTES)
    tensor[5] = 42
    code = (
        "import mmap, sys; from memsvc.arena_client import fetch_arena; fd, n, _ = fetch_arena(sys.argv[1]);"
        "m = mmap.mmap(fd, n); print(m[5]); m[6] = 43; assert 'torch' not in sys.modules"
    )
    seen = subprocess.run([sys.executable, "-c", code, fd_endpoint], capture_output=True, text=True, timeout=60)
    assert (seen.stdout, seen.stderr) == ("42\n", "")
    assert tensor[6] == 43


def test_a_view_keeps_the_memory_when_the_service_and_the_tensor_are_gone(tmp_path: Path, arena_device: str):
    with serving(FakeManager(), tmp_path, ARENA_BYTES, arena_device):
        view = map_arena(str(tmp_path / "arena.sock"), ARENA_BYTES, arena_device)[100:200]
    view.fill_(9)
    assert view.tolist() == [9] * 100


def test_nobody_can_resize_it(fd_endpoint: str):
    fd, num_bytes, _device = fetch_arena(fd_endpoint)
    for size in (num_bytes - 1, num_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_a_layout_of_another_size_and_another_kind_of_device_are_refused(anywhere: str, arena_device: str):
    with pytest.raises(ValueError, match=f"has {ARENA_BYTES} bytes, the layout says 4096"):
        map_arena(anywhere, 4096, arena_device)
    other, lies_on = ("cuda:0", "CPU memory") if arena_device == "cpu" else ("cpu", "on CUDA device GPU-")
    with pytest.raises(ValueError, match=f"arena is {lies_on}.*'{other}'"):
        map_arena(anywhere, ARENA_BYTES, other)


def test_the_device_is_known_by_its_uuid_whatever_its_number(tmp_path: Path, fake_cuda: FakeCuda):
    with serving(FakeManager(), tmp_path, ARENA_BYTES, "cuda:1"):
        endpoint = str(tmp_path / "arena.sock")
        fake_cuda.devices.reverse()  # as a worker sees them that was started with another order
        tensor = map_arena(endpoint, ARENA_BYTES, "cuda")
        assert list(fake_cuda.accessible.values()) == [0]
        del tensor
        assert int(map_arena(endpoint, ARENA_BYTES, "cuda:0").sum()) == 0
        with pytest.raises(ValueError, match=r"lies on cuda:0 \(.*GPU-aaaa.*run on cuda:1 \(.*GPU-0001"):
            map_arena(endpoint, ARENA_BYTES, "cuda:1")
        with pytest.raises(ValueError, match="run on cuda:7, which is not there"):
            map_arena(endpoint, ARENA_BYTES, "cuda:7")
        del fake_cuda.devices[0]
        with pytest.raises(ValueError, match=r"GPU-aaaa.*is not there: this process sees cuda:0 \(.*GPU-0001"):
            map_arena(endpoint, ARENA_BYTES, "cuda")


def test_the_context_comes_first_and_the_mapping_ends_with_the_last_view(tmp_path: Path, fake_cuda: FakeCuda):
    with serving(FakeManager(), tmp_path, ARENA_BYTES, "cuda"):
        tensor = map_arena(str(tmp_path / "arena.sock"), ARENA_BYTES, "cuda")
        names = fake_cuda.names
        assert names.index("context") < names.index("cuMemImportFromShareableHandle")
        # The service's handle; the worker's is given back, as the mapping keeps the memory.
        assert fake_cuda.held == (1, 1, 1)
        view = tensor[4096:8192].view(torch.bfloat16)
        del tensor
        assert fake_cuda.held == (1, 1, 1)
        view.fill_(1.5)
        del view
        assert fake_cuda.names[-3:] == ["finish", "cuMemUnmap", "cuMemAddressFree"]
        assert fake_cuda.held == (1, 0, 0)
    assert fake_cuda.held == (0, 0, 0)


@pytest.mark.parametrize(
    "call", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_a_mapping_that_fails_leaves_nothing_behind(tmp_path: Path, fake_cuda: FakeCuda, call: str):
    with serving(FakeManager(), tmp_path, ARENA_BYTES, "cuda:1"):
        endpoint = str(tmp_path / "arena.sock")
        map_arena(endpoint, ARENA_BYTES, "cuda")
        before = len(os.listdir("/proc/self/fd"))
        fake_cuda.fail[call] = CUresult.CUDA_ERROR_UNKNOWN
        with pytest.raises(ValueError, match=rf"{ARENA_BYTES} bytes .* on cuda:1 .*{call}: CUDA_ERROR_UNKNOWN"):
            map_arena(endpoint, ARENA_BYTES, "cuda")
        assert fake_cuda.held == (1, 0, 0)
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_lost_device_ends_the_service(tmp_path: Path, fake_cuda: FakeCuda):
    with serving(FakeManager(), tmp_path, ARENA_BYTES, "cuda") as server:
        endpoint = str(tmp_path / "arena.sock")
        map_arena(endpoint, ARENA_BYTES, "cuda")
        fake_cuda.fail["cuMemExportToShareableHandle"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        with pytest.raises(ConnectionError):
            map_arena(endpoint, ARENA_BYTES, "cuda")
        server.join()
        assert isinstance(server.error[0], CudaError)


def test_mapping_over_and_over_leaks_no_descriptor(anywhere: str, arena_device: str):
    map_arena(anywhere, ARENA_BYTES, arena_device)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        map_arena(anywhere, ARENA_BYTES, arena_device)
    # The service's thread may still hold the last connection.
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_too_large_an_arena_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=rf"needs {1 << 60} bytes, (\d+) bytes of memory are available") as caught:
        Arena(1 << 60)
    named = int(re.findall(r"\d+", str(caught.value))[1])
    assert abs(named - available_bytes()) < named / 2


@pytest.mark.parametrize(
    ("limit", "usage", "cached", "expected"),
    [("max", 0, 0, None), ("3000", 1000, 0, 2000), ("3000", 2900, 800, 900), ("3000", 3500, 0, 0)],
)
def test_a_containers_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, usage: int, cached: int, expected: int | None
):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{usage}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\nactive_file {cached}\ninactive_file 0\n")
    monkeypatch.setattr(arena_module, "_CGROUP_FILES", [(tmp_path, "memory.max", "memory.current")])
    if expected is None:
        assert available_bytes() > 3000
    else:
        assert available_bytes() == expected


def test_another_user_gets_nothing(anywhere: str, monkeypatch: pytest.MonkeyPatch):
    real = os.geteuid()
    monkeypatch.setattr(arena_module.os, "geteuid", lambda: real + 1)
    with pytest.raises(ConnectionError, match="hands out no arena"):
        fetch_arena(anywhere)


def test_a_missing_service_is_named(tmp_path: Path):
    with pytest.raises(ConnectionError, match=re.escape(str(tmp_path / "arena.sock"))):
        fetch_arena(str(tmp_path / "arena.sock"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "arena.sock"))
        silent.listen()
        with pytest.raises(TimeoutError):
            fetch_arena(str(tmp_path / "arena.sock"), timeout_s=0.02)


def test_a_device_that_is_not_there_is_named_at_the_start(tmp_path: Path):
    flags = ["--arena-bytes", "4M", "--kind", "target_kv:1K:16", "--device", "cuda:99"]
    command = [sys.executable, "-m", "memsvc", "--run-dir", str(tmp_path / "run"), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "cannot serve: " in ended.stderr
    assert "CUDA device" in ended.stderr


def test_nothing_stays_behind_a_killed_owner():
    code = "import sys; from memsvc.arena import Arena; a = Arena(1 << 20);print(a.fd, flush=True); sys.stdin.read()"
    before = set(os.listdir("/dev/shm"))
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        fd = int(child.stdout.readline())
        # It can be mapped while the owner lives, and it has no name anywhere.
        with open(f"/proc/{child.pid}/fd/{fd}", "r+b") as shared, mmap.mmap(shared.fileno(), 0) as mapping:
            assert len(mapping) == 1 << 20
        assert os.readlink(f"/proc/{child.pid}/fd/{fd}").startswith("/memfd:")
        os.kill(child.pid, signal.SIGKILL)
    assert set(os.listdir("/dev/shm")) == before
