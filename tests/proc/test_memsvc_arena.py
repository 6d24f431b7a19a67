"""The arena: one piece of memory, the same in every process, gone with the last of them."""

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
from memsvc.device.arena_map import map_arena
from tests.support.fake_manager import FakeManager
from tests.support.memsvc_thread import serving

ARENA_BYTES = 1 << 20


@pytest.fixture
def fd_endpoint(tmp_path: Path) -> Iterator[str]:
    with serving(FakeManager(), tmp_path, ARENA_BYTES):
        yield str(tmp_path / "arena.sock")


def test_two_maps_are_the_same_bytes(fd_endpoint: str):
    first, second = map_arena(fd_endpoint, ARENA_BYTES), map_arena(fd_endpoint, ARENA_BYTES)
    assert (first.dtype, first.shape) == (torch.uint8, (ARENA_BYTES,))
    assert int(second.sum()) == 0, "the arena starts zeroed"
    first[-1] = 17
    first.view(torch.bfloat16)[:2] = 1.5
    assert second[-1] == 17
    assert second.view(torch.bfloat16)[:2].tolist() == [1.5, 1.5]


def test_another_process_sees_what_is_written(fd_endpoint: str):
    tensor = map_arena(fd_endpoint, ARENA_BYTES)
    tensor[5] = 42
    code = (
        "import mmap, sys; from memsvc.arena_client import fetch_arena; fd, n = fetch_arena(sys.argv[1]);"
        "m = mmap.mmap(fd, n); print(m[5]); m[6] = 43; assert 'torch' not in sys.modules"
    )
    seen = subprocess.run([sys.executable, "-c", code, fd_endpoint], capture_output=True, text=True, timeout=60)
    assert (seen.stdout, seen.stderr) == ("42\n", "")
    assert tensor[6] == 43


def test_a_view_keeps_the_memory_when_the_service_and_the_tensor_are_gone(tmp_path: Path):
    with serving(FakeManager(), tmp_path, ARENA_BYTES):
        view = map_arena(str(tmp_path / "arena.sock"), ARENA_BYTES)[100:200]
    view.fill_(9)
    assert view.tolist() == [9] * 100


def test_nobody_can_resize_it(fd_endpoint: str):
    fd, num_bytes = fetch_arena(fd_endpoint)
    for size in (num_bytes - 1, num_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_a_layout_of_another_size_and_another_device_are_refused(fd_endpoint: str):
    with pytest.raises(ValueError, match=f"has {ARENA_BYTES} bytes, the layout says 4096"):
        map_arena(fd_endpoint, 4096)
    with pytest.raises(ValueError, match="'cuda:0'"):
        map_arena(fd_endpoint, ARENA_BYTES, "cuda:0")


def test_mapping_over_and_over_leaks_no_descriptor(fd_endpoint: str):
    map_arena(fd_endpoint, ARENA_BYTES)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        map_arena(fd_endpoint, ARENA_BYTES)
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


def test_another_user_gets_nothing(fd_endpoint: str, monkeypatch: pytest.MonkeyPatch):
    real = os.geteuid()
    monkeypatch.setattr(arena_module.os, "geteuid", lambda: real + 1)
    with pytest.raises(ConnectionError, match="hands out no arena"):
        fetch_arena(fd_endpoint)


def test_a_missing_service_is_named(tmp_path: Path):
    with pytest.raises(ConnectionError, match=re.escape(str(tmp_path / "arena.sock"))):
        fetch_arena(str(tmp_path / "arena.sock"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "arena.sock"))
        silent.listen()
        with pytest.raises(TimeoutError):
            fetch_arena(str(tmp_path / "arena.sock"), timeout_s=0.02)


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
