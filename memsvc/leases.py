"""Which client processes are alive, by pidfd: the kernel says at once when one has ended."""

import os
import select
from dataclasses import dataclass, field

from memsvc.wire.base import Epoch


@dataclass(slots=True)
class _Watched:
    pid: int
    pidfd: int
    epochs: list[Epoch] = field(default_factory=list)


class ClientWatch:
    """The processes behind registrations. A process may hold several epochs over its life."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._by_fd: dict[int, _Watched] = {}

    def fileno(self) -> int:
        """Readable when a watched process has ended."""
        return self._poll.fileno()

    def open(self, pid: int) -> int | None:
        """A descriptor of the living process pid, for `add`; None if there is no such process.

        The same process gets the same descriptor, so registering over and over opens no more.
        """
        for watched in self._by_fd.values():
            # A pid is not reused before its process has been reaped, and a reaped one has ended.
            if watched.pid == pid and not _has_ended(watched.pidfd):
                return watched.pidfd
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, OverflowError):
            return None
        if _has_ended(pidfd):
            os.close(pidfd)
            return None
        self._by_fd[pidfd] = _Watched(pid, pidfd)
        self._poll.register(pidfd, select.EPOLLIN)
        return pidfd

    def add(self, pidfd: int, epoch: Epoch) -> None:
        """Report epoch when the process ends."""
        self._by_fd[pidfd].epochs.append(epoch)

    def forget(self, epoch: Epoch) -> None:
        """The epoch ended by itself; its process is watched on only for its other epochs."""
        for watched in list(self._by_fd.values()):
            if epoch in watched.epochs:
                watched.epochs.remove(epoch)
                self.release(watched.pidfd)

    def release(self, pidfd: int) -> None:
        """Close a descriptor from `open` if no epoch stands behind it."""
        if not self._by_fd[pidfd].epochs:
            del self._by_fd[pidfd]
            self._poll.unregister(pidfd)
            os.close(pidfd)

    def take_ended(self) -> list[Epoch]:
        """Epochs of processes that have ended since the last call; they are not watched any more."""
        ended = []
        for pidfd, _ in self._poll.poll(0):
            watched = self._by_fd[pidfd]
            ended.extend(watched.epochs)
            watched.epochs.clear()
            self.release(pidfd)
        return ended

    def close(self) -> None:
        """Stop watching."""
        for pidfd in self._by_fd:
            os.close(pidfd)
        self._by_fd.clear()
        self._poll.close()


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
