"""Fetches the arena's file descriptor from the service. Needs neither torch nor zmq."""

import os
import socket
import struct
from typing import NamedTuple

ANSWER = struct.Struct("<q16s")
"""The one message of the arena socket, with the descriptor beside it: the arena's bytes, and the UUID of the CUDA
device that it lies on, or CPU_MEMORY."""
CPU_MEMORY = bytes(16)
"""In a UUID's stead: the descriptor is CPU memory, to be mapped by mmap."""


class FetchedArena(NamedTuple):
    """What the service hands out."""

    fd: int
    """The caller's to close."""
    num_bytes: int
    device_uuid: bytes
    """CPU_MEMORY, or the CUDA device whose driver can import the descriptor."""


def fetch_arena(fd_endpoint: str, timeout_s: float = 10.0) -> FetchedArena:
    """The arena behind Registered.fd_endpoint; the caller closes the descriptor.

    Raises ConnectionError if nobody listens there or the service refuses, TimeoutError if it is silent.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(timeout_s)
        try:
            peer.connect(fd_endpoint)
            data, fds, _flags, _address = socket.recv_fds(peer, ANSWER.size, 1)
        except FileNotFoundError:
            raise ConnectionError(f"no arena socket at {fd_endpoint}") from None
    if len(fds) != 1 or len(data) != ANSWER.size:
        for fd in fds:
            os.close(fd)
        raise ConnectionError(f"the service at {fd_endpoint} hands out no arena to uid {os.geteuid()}")
    os.set_inheritable(fds[0], False)
    return FetchedArena(fds[0], *ANSWER.unpack(data))
