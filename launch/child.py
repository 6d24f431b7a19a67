"""One child process: started so that it dies with this one, watched by its pidfd, never by its name."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: the child may do little between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """How to start one role."""

    command: Sequence[str]
    """Program and arguments."""
    env: Mapping[str, str]
    """The whole environment."""
    pass_fds: tuple[int, ...] = ()
    """Descriptors that the child keeps."""
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL."""


class Child:
    """A running process. `fd` gets readable when it ends."""

    def __init__(self, role: str, spec: ChildSpec) -> None:
        self.role = role
        self.grace_s = spec.grace_s
        supervisor = os.getpid()
        self._process = subprocess.Popen(
            spec.command,
            env=spec.env,
            pass_fds=spec.pass_fds,
            # A Ctrl-C in the terminal must reach the supervisor alone, which stops the others in order.
            process_group=0,
            # Set by the children too; here there is no moment in which one could be orphaned.
            preexec_fn=lambda: die_with(supervisor),
        )
        self.fd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def terminate(self) -> None:
        """Ask it to end. Nothing happens if it has."""
        self._process.terminate()

    def kill(self) -> None:
        """End it. Nothing happens if it has."""
        self._process.kill()

    def reap(self) -> int:
        """Its exit status, negative for the signal that killed it. Call it once, after fd got readable."""
        status = self._process.wait()
        os.close(self.fd)
        return status


def ending(status: int) -> str:
    """How a process ended, for people."""
    return f"ended with status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def die_with(supervisor: int) -> None:
    """For a preexec_fn: get SIGTERM when the process that started this one, whose pid is supervisor, ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)
