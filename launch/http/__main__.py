"""`python -m launch.http --config FILE`: the front as a process of its own."""

import os
import resource
import socket
import sys
from pathlib import Path

import uvloop

from launch.http.config import API_KEY_ENV, FrontConfig
from launch.http.listen import BACKLOG, bind_tcp
from launch.http.serve import serve
from memsvc.process import Program, refuse

PROGRAM = Program(package="launch.http", role="front", config_type=FrontConfig)
_OTHER_DESCRIPTORS = 256
"""Beside the connections: sockets of the links, logs, the loop's own."""


def main() -> int:
    """Read the config, listen, serve. 0 after SIGTERM, 1 if it can't listen."""
    config = PROGRAM.begin()
    api_key = os.environ.get(API_KEY_ENV, "") if config.requires_key else ""
    try:
        listener = _listener(config, api_key)
    except (OSError, ValueError) as error:
        return refuse(PROGRAM.role, Path(config.run_dir), error)
    _allow_descriptors(config.max_connections + _OTHER_DESCRIPTORS)
    with listener:
        uvloop.run(serve(config, api_key, listener))
    return 0


def _allow_descriptors(num: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < num:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num if hard == resource.RLIM_INFINITY else min(num, hard), hard))


def _listener(config: FrontConfig, api_key: str) -> socket.socket:
    if config.requires_key and not api_key:
        raise ValueError(f"an API key is required and {API_KEY_ENV} is not set")
    handed_down = config.listen_fd >= 0
    listener = socket.socket(fileno=config.listen_fd) if handed_down else bind_tcp(config.host, config.port)
    # Only now: until a front is there, clients shall be refused, not kept waiting.
    listener.listen(BACKLOG)
    return listener


if __name__ == "__main__":
    sys.exit(main())
