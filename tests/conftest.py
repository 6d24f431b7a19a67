"""What holds for every test: threads, where Triton kernels run, a hypothesis profile, and a count of what was skipped."""

import os

import pytest

from tests.support import hypothesis_profiles
from tests.support.kernels import choose_interpreter, device

__all__ = ["device"]

# No test has been imported yet, so nothing has imported torch, and every process that a test starts
# inherits it: the machine's cores are for the processes, not for a thread pool in each of them.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

choose_interpreter()
hypothesis_profiles.load()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A skipped test proves nothing: say how many there are, also if there are none."""
    terminalreporter.write_line(f"skipped={len(terminalreporter.stats.get('skipped', []))}")
