"""`python -m draft_worker --config FILE`: draft for one target until SIGTERM."""

import os
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from draft_worker.config import DraftConfig
from memsvc.process import Program, Serving

PROGRAM = Program(package="draft_worker", role="draft", config_type=DraftConfig, parent_signal=signal.SIGKILL)


def make(config: DraftConfig) -> AbstractContextManager[Serving]:
    """The worker, loaded and registered."""
    # OpenMP reads this when torch loads it. By default its threads spin between two kernels and use up
    # their time slice, and where another process shares the cores each kernel then waits for the next
    # one: a propose took 296 ms instead of 15 with one busy process beside it on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Imported here so that --help and a bad config answer without loading torch.
    from draft_worker.process import DraftProcess

    return DraftProcess(config, Path(config.run_dir))


if __name__ == "__main__":
    sys.exit(PROGRAM.main(make))
