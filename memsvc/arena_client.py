"""Fetches the arena's file descriptor from the service. Needs neither torch nor zmq."""

import os
import socket
import struct

SIZE_FORMAT = "<q"
"""The one message of the arena socket: the arena's bytes, with its descriptor beside it."""


def fetch_arena(fd_endpoint: str, timeout_s: float = 10.0) -> tuple[int, int]:
    """(file descriptor, bytes) of the arena behind Registered.fd_endpoint; the caller closes the descriptor.

    Raises ConnectionError if nobody listens there or the service refuses, TimeoutError if it is silent.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(timeout_s)
        try:
            peer.connect(fd_endpoint)
            data, fds, _flags, _address = socket.recv_fds(peer, struct.calcsize(SIZE_FORMAT), 1)
        except FileNotFoundError:
            raise ConnectionError(f"no arena socket at {fd_endpoint}") from None
    if len(fds) != 1 or len(data) != struct.calcsize(SIZE_FORMAT):
        for fd in fds:
            os.close(fd)
        raise ConnectionError(f"the service at {fd_endpoint} hands out no arena to uid {os.geteuid()}")
    os.set_inheritable(fds[0], False)
    return fds[0], struct.unpack(SIZE_FORMAT, data)[0]
