"""`python -m target_worker --config FILE`: serve until SIGTERM."""

import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from memsvc.process import Program, Serving
from target_worker.config import TargetConfig

PROGRAM = Program(package="target_worker", role="target", config_type=TargetConfig, parent_signal=signal.SIGKILL)


def make(config: TargetConfig) -> AbstractContextManager[Serving]:
    """The worker, loaded and registered."""
    # Imported here so that --help and a bad config answer without loading torch.
    from target_worker.worker import Worker

    return Worker(config, Path(config.run_dir))


if __name__ == "__main__":
    sys.exit(PROGRAM.main(make))
