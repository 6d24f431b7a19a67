"""Sockets of a Link: who binds which type, with which limits, in which directory."""

import os
import stat
import threading
from pathlib import Path
from typing import Any, TypeVar

import zmq

from memsvc.wire.links import MAX_MSG_BYTES, Link

SocketT = TypeVar("SocketT", bound=zmq.Socket[Any])

HWM = 1000
"""Messages queued for one peer: a PUSH or DEALER then blocks (EAGAIN if asked not to), a ROUTER drops."""

_SUN_PATH_BYTES = 107
_umask_lock = threading.Lock()


def bind(context: zmq.Context[SocketT], link: Link, run_dir: Path) -> SocketT:
    """The binder's socket of a link (ROUTER or PULL); its file is for this user alone.

    Works with zmq.Context and zmq.asyncio.Context. Raises ValueError on a run directory that others
    can enter, zmq.ZMQError if the address can't be bound.
    """
    check_run_dir(run_dir)
    socket = _make_socket(context, link.sockets.partition("/")[2])
    # libzmq creates the file inside zmq_bind, so the mask need not stay longer.
    with _umask_lock:
        old_mask = os.umask(0o077)
        try:
            socket.bind(check_endpoint(link.endpoint(run_dir)))
        except BaseException:
            socket.close()
            raise
        finally:
            os.umask(old_mask)
    return socket


def connect(context: zmq.Context[SocketT], link: Link, run_dir: Path) -> SocketT:
    """The other side's socket of a link (DEALER or PUSH). The binder may come later."""
    endpoint = check_endpoint(link.endpoint(run_dir))
    socket = _make_socket(context, link.sockets.partition("/")[0])
    socket.connect(endpoint)
    return socket


def arena_path(run_dir: Path) -> Path:
    """Where the service hands out the arena's descriptor; clients read it from Registered."""
    return run_dir / "arena.sock"


def make_run_dir(run_dir: Path) -> None:
    """Create the directory with mode 0700 if it is missing, and check it."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_run_dir(run_dir)


def check_run_dir(run_dir: Path) -> None:
    """Raise ValueError unless run_dir is a directory of this user that nobody else may enter."""
    try:
        info = run_dir.stat()
    except FileNotFoundError:
        raise ValueError(f"run directory {run_dir} does not exist") from None
    if not stat.S_ISDIR(info.st_mode):
        raise ValueError(f"run directory {run_dir} is not a directory")
    if info.st_uid != os.geteuid():
        raise ValueError(f"run directory {run_dir} belongs to uid {info.st_uid}, this process runs as {os.geteuid()}")
    if info.st_mode & 0o077:
        raise ValueError(f"run directory {run_dir} has mode {stat.S_IMODE(info.st_mode):04o}, it must be 0700")


def check_endpoint(endpoint: str) -> str:
    """The endpoint, if it is a local one. Raises ValueError on tcp:// and on a path that is too long."""
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc":
        raise ValueError(f"endpoint {endpoint!r}: only ipc:// is served, remote clients are not supported")
    if len(os.fsencode(path)) > _SUN_PATH_BYTES:
        raise ValueError(
            f"socket path {path!r} has {len(os.fsencode(path))} bytes, the system allows {_SUN_PATH_BYTES}"
        )
    return endpoint


def _make_socket(context: zmq.Context[SocketT], type_name: str) -> SocketT:
    socket = context.socket(getattr(zmq, type_name))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MSG_BYTES)
    socket.setsockopt(zmq.SNDHWM, HWM)
    socket.setsockopt(zmq.RCVHWM, HWM)
    return socket
