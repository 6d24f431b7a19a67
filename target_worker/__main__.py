"""`python -m target_worker --config FILE`: serve until SIGTERM."""

import argparse
import logging
import os
import signal
from pathlib import Path

import msgspec

from memsvc.process import StopFlag, announce, die_with_parent, install_sigterm, setup_logging
from memsvc.wire.control import Fatal, Ready
from target_worker.config import TargetConfig

logger = logging.getLogger(__name__)

ROLE = "target"


def main() -> None:
    """Parse the one flag and run."""
    parser = argparse.ArgumentParser(prog="python -m target_worker", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="JSON of target_worker.config.TargetConfig")
    config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=TargetConfig)
    die_with_parent(number=signal.SIGKILL)
    setup_logging(ROLE, config.log_level)
    stop = StopFlag()
    install_sigterm(stop.set)
    run_dir = Path(config.run_dir)
    # Imported here so that --help and a bad config answer without loading torch.
    from target_worker.worker import Worker

    try:
        worker = Worker(config, run_dir)
    except (ValueError, OSError) as error:
        logger.error("cannot start: %s", error)
        announce(run_dir, Fatal(ROLE, os.getpid(), str(error)))
        raise SystemExit(1) from error
    with worker:
        announce(run_dir, Ready(ROLE, os.getpid(), worker.lines()))
        while not stop.is_set:
            worker.step()
    logger.info("stopped")


if __name__ == "__main__":
    main()
