"""The service's side of the arena: the memory itself, and the Unix socket that hands it out.

The memory is anonymous (memfd): it has no name in any file system, so nothing stays behind when
the last process that maps it is gone, however it went.
"""

import fcntl
import logging
import os
import socket
import struct
from pathlib import Path
from typing import Protocol

from memsvc.arena_client import ANSWER, CPU_MEMORY

logger = logging.getLogger(__name__)

_CGROUP_FILES = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Where a container's limit stands: control groups of version 2 and of version 1."""


class ArenaMemory(Protocol):
    """What the arena socket hands out: memory of the CPU (Arena) or of a device (CudaArena)."""

    num_bytes: int
    fd: int
    device_uuid: bytes
    """CPU_MEMORY, or the 16 bytes of a CUDA device."""

    def check(self) -> None:
        """Raises if the memory can no longer be handed out."""
        ...

    def close(self) -> None:
        """Let go of the memory; it lives on in processes that have mapped it."""
        ...


class Arena:
    """num_bytes of shared memory, committed at once, that nobody can resize."""

    def __init__(self, num_bytes: int) -> None:
        """Raises ValueError with the numbers if the machine has less memory available than that."""
        check_room(num_bytes)
        self.num_bytes = num_bytes
        self.device_uuid = CPU_MEMORY
        self.fd = os.memfd_create("memsvc-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Committed now: running out later would kill a process in the middle of a forward.
            os.posix_fallocate(self.fd, 0, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(self.fd)
            raise ValueError(f"the arena needs {num_bytes} bytes, the system says: {error.strerror}") from error

    def check(self) -> None:
        """Nothing happens to memory that is committed."""

    def close(self) -> None:
        """Let go of the memory; it lives on in processes that have mapped it."""
        os.close(self.fd)


def check_room(num_bytes: int) -> None:
    """Raise ValueError with the numbers if less than num_bytes of memory is available."""
    available = available_bytes()
    if num_bytes > available:
        raise ValueError(f"the arena needs {num_bytes} bytes, {available} bytes of memory are available")


def available_bytes() -> int:
    """Memory that can still be committed: MemAvailable, or what the control group leaves if that is less."""
    fields = _read_table(Path("/proc/meminfo"))
    return min([fields["MemAvailable"] * 1024, *_cgroup_available()])


def _cgroup_available() -> list[int]:
    available = []
    for folder, limit_name, usage_name in _CGROUP_FILES:
        try:
            limit = (folder / limit_name).read_text(encoding="ascii").strip()
            usage = int((folder / usage_name).read_text(encoding="ascii"))
            stat = _read_table(folder / "memory.stat")
        except OSError:
            continue
        if limit.isdigit():
            # Cached files count as used, but give way to whoever needs the memory.
            file_cache = sum(stat.get(f"total_{name}", stat[name]) for name in ("active_file", "inactive_file"))
            available.append(max(0, int(limit) - usage + file_cache))
    return available


def _read_table(path: Path) -> dict[str, int]:
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


class ArenaSocket:
    """Hands a descriptor of the arena to every process of the same user that connects.

    It reads nothing from a peer, so nothing a peer sends can do harm.
    """

    def __init__(self, path: Path, arena: ArenaMemory) -> None:
        self._arena = arena
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # bind would refuse the leftover of a killed service; the directory's lock says it is one.
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(64)

    def fileno(self) -> int:
        """Readable when accept_one has something to do."""
        return self._listener.fileno()

    def accept_one(self) -> None:
        """Serve one waiting peer. Never blocks; a peer that is gone or belongs to another user gets nothing.

        Raises what check raises, if the memory itself is lost.
        """
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            logger.warning("arena accept failed error=%s", error)
            return
        with peer:
            peer.setblocking(False)
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, uid, _gid = struct.unpack("3i", credentials)
            if uid != os.geteuid():
                logger.warning("arena refused pid=%d uid=%d", pid, uid)
                return
            arena = self._arena
            arena.check()
            try:
                socket.send_fds(peer, [ANSWER.pack(arena.num_bytes, arena.device_uuid)], [arena.fd])
            except OSError as error:
                logger.warning("arena send failed pid=%d error=%s", pid, error)

    def close(self) -> None:
        """Stop listening and remove the socket's file."""
        self._listener.close()
        self._path.unlink(missing_ok=True)
