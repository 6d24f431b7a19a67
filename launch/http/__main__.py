"""`python -m launch.http --config FILE`: the front as a process of its own."""

import argparse
import logging
import os
import resource
import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from launch.http.config import API_KEY_ENV, FrontConfig
from launch.http.listen import BACKLOG, bind_tcp
from launch.http.serve import serve
from memsvc.process import announce, die_with_parent, setup_logging
from memsvc.wire.control import Fatal

logger = logging.getLogger(__name__)

_OTHER_DESCRIPTORS = 256
"""Beside the connections: sockets of the links, logs, the loop's own."""


def main() -> int:
    """Read the config, listen, serve. 0 after SIGTERM, 1 if it can't listen."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m launch.http", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON of the front's config")
    config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=FrontConfig)
    setup_logging("front", config.log_level)
    api_key = os.environ.get(API_KEY_ENV, "") if config.requires_key else ""
    try:
        listener = _listener(config, api_key)
    except (OSError, ValueError) as error:
        logger.error("cannot serve: %s", error)
        announce(Path(config.run_dir), Fatal("front", os.getpid(), str(error)))
        return 1
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
