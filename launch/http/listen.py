"""The TCP socket of the front. The supervisor binds it, so that it outlives a front that restarts."""

import socket

BACKLOG = 1024


def bind_tcp(host: str, port: int) -> socket.socket:
    """A socket bound to host:port, port 0 taking a free one; it does not listen yet. Raises OSError that names both."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound


def url_of(bound: socket.socket) -> str:
    """The address clients use."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
