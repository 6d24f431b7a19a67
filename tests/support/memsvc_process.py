"""A real memory service in a process of its own, for tests and benchmarks."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]

SMALL_POOL = ("--arena-bytes", "68K", "--page-size", "4", "--kind", "target_kv:1K:4", "--kind", "draft_kv:512:4")
"""Some dozens of pages of two kinds."""


@contextmanager
def memory_service(run_dir: Path, flags: Sequence[str] = SMALL_POOL) -> Iterator[subprocess.Popen[str]]:
    """`python -m memsvc` on run_dir, ready; stopped by SIGTERM at the end unless it has ended already."""
    service = start_service(run_dir, flags)
    try:
        yield service
    finally:
        service.terminate()
        service.communicate(timeout=20)


def start_service(run_dir: Path, flags: Sequence[str] = SMALL_POOL) -> subprocess.Popen[str]:
    """The same without the end; the caller waits for the process."""
    command = [sys.executable, "-m", "memsvc", "--run-dir", str(run_dir), *flags]
    service = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    lines = []
    for line in service.stdout:
        lines.append(line)
        if line.startswith("ready:"):
            return service
    raise AssertionError(f"no ready line, status {service.wait(20)}: {lines}")


def cpu_seconds(pid: int) -> float:
    """CPU time that all threads of a process have used, to the nanosecond."""
    nanoseconds = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as stat:
            nanoseconds += int(stat.read().split()[0])
    return nanoseconds / 1e9
