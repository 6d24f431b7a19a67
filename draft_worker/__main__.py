"""`python -m draft_worker --config FILE`: draft for one target until SIGTERM."""

import argparse
import logging
import os
import signal
from pathlib import Path

import msgspec

from draft_worker.config import DraftConfig
from memsvc.errors import MemoryServiceError
from memsvc.process import StopFlag, announce, die_with_parent, install_sigterm, setup_logging
from memsvc.wire.control import Fatal, Ready

logger = logging.getLogger(__name__)

ROLE = "draft"


def main() -> None:
    """Parse the one flag and run."""
    parser = argparse.ArgumentParser(prog="python -m draft_worker", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="JSON of draft_worker.config.DraftConfig")
    config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=DraftConfig)
    die_with_parent(number=signal.SIGKILL)
    setup_logging(ROLE, config.log_level)
    stop = StopFlag()
    install_sigterm(stop.set)
    run_dir = Path(config.run_dir)
    try:
        _serve(config, run_dir, stop)
    except MemoryServiceError as error:
        # A restart registers anew, and the target tells the new process everything it needs.
        logger.error("the memory service gave this client up: %s", error)
        raise SystemExit(1) from error
    logger.info("stopped")


def _serve(config: DraftConfig, run_dir: Path, stop: StopFlag) -> None:
    # OpenMP reads this when torch loads it. By default its threads spin between two kernels and use up
    # their time slice, and where another process shares the cores each kernel then waits for the next
    # one: a propose took 296 ms instead of 15 with one busy process beside it on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Imported here so that --help and a bad config answer without loading torch.
    from draft_worker.process import DraftProcess

    try:
        process = DraftProcess(config, run_dir)
    except (ValueError, OSError) as error:
        logger.error("cannot start: %s", error)
        announce(run_dir, Fatal(ROLE, os.getpid(), str(error)))
        raise SystemExit(1) from error
    with process:
        announce(run_dir, Ready(ROLE, os.getpid(), process.lines()))
        process.run(stop)


if __name__ == "__main__":
    main()
