"""`python -m memsvc`: serve until SIGTERM. `python -m memsvc stats|check|snapshot`: look into a running one."""

import gc
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import zmq

from memsvc.arena import Arena, check_room
from memsvc.config import MemConfig, parse_config
from memsvc.core.manager import MemoryManager
from memsvc.inspect import COMMANDS, inspect
from memsvc.process import StopFlag, announce, die_with_parent, install_sigterm, setup_logging
from memsvc.server import ManagerBug, serve
from memsvc.transport import arena_path, make_run_dir
from memsvc.wire.control import Fatal, Ready

logger = logging.getLogger(__name__)

ROLE = "memsvc"


def main(argv: list[str]) -> int:
    """Run the command line; the exit status."""
    if argv and argv[0] in COMMANDS:
        return inspect(argv)
    try:
        config = parse_config(argv[1:] if argv[:1] == ["serve"] else argv)
    except (ValueError, OSError) as error:
        print(f"python -m memsvc: {error}", file=sys.stderr)
        return 2
    if config.supervised:
        die_with_parent()
    setup_logging(ROLE, config.log_level)
    stop = StopFlag()
    install_sigterm(stop.set)
    run_dir = Path(config.run_dir)
    try:
        _run(config, run_dir, stop)
    except (ValueError, OSError, zmq.ZMQError) as error:
        logger.error("cannot serve: %s", error)
        if config.supervised:
            announce(run_dir, Fatal(ROLE, os.getpid(), str(error)))
        return 1
    except ManagerBug:
        logger.critical("bug in the memory manager", exc_info=True)
        return 1
    logger.info("stopped")
    return 0


def _run(config: MemConfig, run_dir: Path, stop: StopFlag) -> None:
    make_run_dir(run_dir)
    # Before the manager, which would build tables for that many pages first.
    check_room(config.pool.arena_bytes)
    pool = replace(config.pool, fd_endpoint=str(arena_path(run_dir)))
    # A client of a service that died here earlier may still send its old epoch.
    manager = MemoryManager(pool, first_epoch=time.time_ns() // 1_000_000)
    arena = Arena(manager.layout.arena_bytes)
    try:
        serve(manager, arena, run_dir, stop, lambda: _say_ready(config, run_dir, manager.plan_lines()))
    finally:
        arena.close()


def _say_ready(config: MemConfig, run_dir: Path, lines: list[str]) -> None:
    # What stands now lives until the end, and later garbage is freed by counting almost always: look
    # for cycles seldom, since a look at a tree of a million pages stops everything.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    if config.supervised:
        announce(run_dir, Ready(ROLE, os.getpid(), lines))
        return
    for line in lines:
        print(line)
    print(f"ready: run_dir={run_dir} pid={os.getpid()}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
