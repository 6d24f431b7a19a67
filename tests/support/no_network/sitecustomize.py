"""Python imports this before anything else if its folder is on PYTHONPATH: nothing beyond this machine is reached.

Whoever tries gets an OSError, and a line in the file that $NETWORK_TRIES names, for those who catch the error.
"""

import os
import sys

_EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname")


def _host(event: str, args: tuple[object, ...]) -> str:
    """Empty if it is no name and no address of a network."""
    target = args[1] if event in ("socket.connect", "socket.sendto") else args
    return str(target[0] or "") if isinstance(target, tuple) else ""


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event not in _EVENTS:
        return
    host = _host(event, args)
    if host and host not in ("localhost", "::1", "::", "0.0.0.0") and not host.startswith("127."):
        with open(os.environ["NETWORK_TRIES"], "a") as file:
            file.write(f"{event} {host} {sys.argv}\n")
        raise OSError(f"{event} {host}: there is no network here")


sys.addaudithook(_refuse)
