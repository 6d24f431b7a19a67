"""`python -m memsvc`: serve until SIGTERM. `python -m memsvc stats|check|snapshot`: look into a running one."""

import gc
import logging
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import zmq

from memsvc import cuda_arena
from memsvc.arena import Arena, ArenaMemory, check_room
from memsvc.config import CPU, MemConfig, parse_config
from memsvc.core.manager import MemoryManager
from memsvc.cuda_arena import CudaArena
from memsvc.cuda_driver import CudaError
from memsvc.heart import BEAT_S, Heart
from memsvc.inspect import COMMANDS, inspect
from memsvc.process import StopFlag, announce, die_with_parent, install_sigterm, refuse, setup_logging
from memsvc.server import Manager, ManagerBug, serve
from memsvc.transport import arena_path, make_run_dir
from memsvc.wire.control import Ready

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
        if config.supervised:
            return refuse(ROLE, run_dir, error)
        logger.error("cannot serve: %s", error)
        return 1
    except ManagerBug as bug:
        # Without the traceback: the texts of the errors behind it may quote tokens.
        logger.critical("bug in the memory manager: %s", bug)
        return 1
    except CudaError as error:
        logger.critical("the device's memory is lost: %s", error)
        return 1
    logger.info("stopped")
    return 0


def _run(config: MemConfig, run_dir: Path, stop: StopFlag) -> None:
    make_run_dir(run_dir)
    # Before the manager, which would build tables for that many pages first.
    arena_bytes = _checked_bytes(config.device, config.pool.arena_bytes)
    pool = replace(config.pool, arena_bytes=arena_bytes, fd_endpoint=str(arena_path(run_dir)))
    # A client of a service that died here earlier may still send its old epoch.
    manager = MemoryManager(pool, first_epoch=time.time_ns() // 1_000_000)
    with ExitStack() as stack:
        arena = make_arena(config.device, manager.layout.arena_bytes)
        stack.callback(arena.close)
        beating = _Beating(manager)
        served: Manager = beating if config.supervised else manager

        def on_ready() -> None:
            _say_ready(config, run_dir, manager.plan_lines())
            if config.supervised:
                # Connected after Ready has gone out, so that no sign of life overtakes it.
                beating.heart = stack.enter_context(Heart(run_dir, ROLE))

        serve(served, arena, run_dir, stop, on_ready)


def _checked_bytes(device: str, num_bytes: int) -> int:
    """The bytes that the arena will have. Raises ValueError with the numbers if they are not there."""
    if device != CPU:
        return cuda_arena.check_room(device, num_bytes)
    check_room(num_bytes)
    return num_bytes


def make_arena(device: str, num_bytes: int) -> ArenaMemory:
    """Memory of that size on a device named as MemConfig has it."""
    return Arena(num_bytes) if device == CPU else CudaArena(device, num_bytes)


class _Beating:
    """The manager, with a sign of life at every tick and a tick at least every BEAT_S."""

    def __init__(self, manager: MemoryManager) -> None:
        self.heart: Heart | None = None
        self.handle = manager.handle
        self.handle_admin = manager.handle_admin
        self.client_exited = manager.client_exited
        self._tick = manager.tick

    def tick(self) -> float:
        assert self.heart is not None, "a tick before the service was ready"
        self.heart.beat()
        return min(BEAT_S, self._tick())


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
