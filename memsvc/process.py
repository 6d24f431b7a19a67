"""What every process does at its edges: die with its parent, log, stop on SIGTERM, say that it serves."""

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
import zmq

from memsvc.errors import MemoryServiceError
from memsvc.heart import Heart
from memsvc.outline import trace
from memsvc.wire.codec import encode
from memsvc.wire.control import Fatal, Ready
from memsvc.wire.links import ALL_LAUNCH

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_ANNOUNCE_LINGER_MS = 2000


def die_with_parent(parent_pid: int = 0, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send that signal to this process when the thread that started it ends.

    SIGKILL is for processes that may wait for a peer for long and leave nothing to tidy up. parent_pid is
    the parent as the caller knows it (0: the parent now). If that process is gone already, this one exits
    at once with status 1. Raises OSError where prctl is not allowed.
    """
    expected = parent_pid or os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    # A parent that died before prctl sends no signal any more, so look once after it.
    if os.getppid() != expected:
        raise SystemExit(1)


def setup_logging(role: str, level: str = "INFO") -> None:
    """Send all logs to stderr in the one format of the project: time, role, level, message."""
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ {role} %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class StopFlag:
    """A flag with a file descriptor: a blocking poll that watches fd wakes when the flag is set."""

    def __init__(self) -> None:
        self.fd, self._wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakes_on_signals = False
        self.is_set = False

    def set(self) -> None:
        """Safe in a signal handler and from other threads; fd stays readable from now on."""
        self.is_set = True
        os.write(self._wake_fd, b"\0")

    def wake_on_signals(self) -> None:
        """Make fd readable when a signal arrives, even before its handler has run. Main thread only.

        A signal between the last byte code and the poll below it has run no handler yet and interrupts
        no system call; without this the poll would sleep through it.
        """
        signal.set_wakeup_fd(self._wake_fd)
        self._wakes_on_signals = True

    def close(self) -> None:
        """Give the descriptors back. The flag must not be set after this."""
        if self._wakes_on_signals:
            signal.set_wakeup_fd(-1)
        os.close(self.fd)
        os.close(self._wake_fd)


def install_sigterm(callback: Callable[[], object]) -> None:
    """Call callback on SIGTERM, and on Ctrl-C for a process run by hand.

    Inside a running asyncio loop the callback runs in the loop; otherwise in the main thread between
    two byte codes, so there it should do no more than set a flag: pass StopFlag.set, which also wakes
    polls that watch its fd.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        flag = getattr(callback, "__self__", None)
        if isinstance(flag, StopFlag):
            flag.wake_on_signals()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: callback())
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, callback)


def announce(run_dir: Path, msg: Ready | Fatal) -> None:
    """Tell the supervisor of run_dir. Blocks at most two seconds, and only if nobody listens there."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, _ANNOUNCE_LINGER_MS)
        socket.setsockopt(zmq.SNDTIMEO, _ANNOUNCE_LINGER_MS)
        socket.connect(ALL_LAUNCH.endpoint(run_dir))
        socket.send(encode(msg))


def refuse(role: str, run_dir: Path, error: Exception) -> int:
    """Log why this process cannot serve, tell the supervisor that a restart would not help; the exit status."""
    logger.error("cannot serve: %s", error)
    announce(run_dir, Fatal(role, os.getpid(), str(error)))
    return 1


@contextmanager
def _uncollected() -> Iterator[None]:
    """Garbage is not looked for within, and what is there at the end is never looked at again.

    170,000 objects of torch live as long as the process. Looking at all of them takes 100 to 200 ms: twice or more
    while they are imported, 0.3 s of 2.4, and later now and then between two steps.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class ProcessConfig(Protocol):
    """What every process's config has."""

    @property
    def run_dir(self) -> str:
        """Directory of the sockets."""
        ...

    @property
    def log_level(self) -> str:
        """Level of the process log."""
        ...


ConfigT = TypeVar("ConfigT", bound=ProcessConfig)


class Serving(Protocol):
    """A process that is ready to serve."""

    def lines(self) -> list[str]:
        """What an operator reads at start."""
        ...

    def num_device_bytes(self) -> int:
        """What it holds of a CUDA device beside the arena and its context; 0 without a device."""
        ...

    def meet(self, stop: StopFlag) -> None:
        """Wait for the peer without which this process is of no use yet; at once if there is none, or stop is set.

        Its parent is told that it serves after that.
        """
        ...

    def run(self, stop: StopFlag, beat: Callable[[], None]) -> None:
        """Serve until stop is set. Every turn of the loop calls beat, and long work now and then within a turn."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Program(Generic[ConfigT]):
    """`python -m PACKAGE --config FILE`, started by launch."""

    package: str
    role: str
    config_type: type[ConfigT]
    """FILE is its JSON."""
    parent_signal: signal.Signals = signal.SIGTERM
    """What this process gets when its parent ends."""

    def begin(self) -> ConfigT:
        """Parse the one flag, die with the parent, log as the config says."""
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.package}", description=f"Serve as the {self.role} of one run; launch starts it."
        )
        named = f"{self.config_type.__module__}.{self.config_type.__name__}"
        parser.add_argument("--config", required=True, type=Path, help=f"JSON of {named}")
        config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=self.config_type)
        die_with_parent(number=self.parent_signal)
        setup_logging(self.role, config.log_level)
        return config

    def main(self, make: Callable[[ConfigT], AbstractContextManager[Serving]]) -> int:
        """Make what serves, let it meet its peer, say Ready, run it until SIGTERM; the exit status.

        ValueError, OSError and ZMQError while it is made are Fatal: a restart would meet them again. A memory
        service that gives this client up ends the process with status 1, and a restart registers anew.
        """
        config = self.begin()
        stop = StopFlag()
        install_sigterm(stop.set)
        run_dir = Path(config.run_dir)
        try:
            with ExitStack() as stack:
                try:
                    with _uncollected():
                        serving = stack.enter_context(make(config))
                except (ValueError, OSError, zmq.ZMQError) as error:
                    return refuse(self.role, run_dir, error)
                serving.meet(stop)
                if not stop.is_set:
                    ready = Ready(self.role, os.getpid(), serving.lines(), serving.num_device_bytes())
                    announce(run_dir, ready)
                    # Connected after Ready has gone out, so that no sign of life overtakes it.
                    serving.run(stop, stack.enter_context(Heart(run_dir, self.role)).beat)
        except MemoryServiceError as error:
            logger.error("the memory service gave this client up: %s", error)
            return 1
        except Exception as error:
            # No traceback: the text of an error may quote what a user wrote.
            logger.critical("bug: %s", trace(error))
            return 1
        logger.info("stopped")
        return 0
