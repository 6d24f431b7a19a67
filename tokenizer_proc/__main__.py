"""`python -m tokenizer_proc --config FILE`: serve until SIGTERM."""

import argparse
import logging
import os
from pathlib import Path

import msgspec
import zmq

from memsvc.process import StopFlag, announce, die_with_parent, install_sigterm, setup_logging
from memsvc.wire.control import Fatal, Ready
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import PromptEncoder
from tokenizer_proc.worker import open_worker

logger = logging.getLogger(__name__)

ROLE = "tokenizer"


def main() -> None:
    """Parse the one flag and run."""
    parser = argparse.ArgumentParser(prog="python -m tokenizer_proc", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="JSON of tokenizer_proc.config.TokenizerConfig")
    config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=TokenizerConfig)
    die_with_parent()
    setup_logging(ROLE, config.log_level)
    stop = StopFlag()
    install_sigterm(stop.set)
    run_dir = Path(config.run_dir)
    try:
        encoder = PromptEncoder(config)
        with open_worker(config, encoder) as worker:
            announce(run_dir, Ready(ROLE, os.getpid(), encoder.lines()))
            worker.run(stop)
    except (ValueError, OSError, zmq.ZMQError) as error:
        logger.error("cannot serve: %s", error)
        announce(run_dir, Fatal(ROLE, os.getpid(), str(error)))
        raise SystemExit(1) from error
    logger.info("stopped")


if __name__ == "__main__":
    main()
