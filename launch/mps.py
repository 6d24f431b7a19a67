"""--mps on: an MPS daemon of this server's own, under which the workers' kernels share the device without time slices.

It runs as this user, with its pipes and logs in the run directory; nothing about the device is changed.
"""

import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from launch.child import die_with

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
ROLES = ("memsvc", "target", "draft")
"""Who runs under it. The memory service has no kernels, but workers under MPS import memory only from one of theirs."""
START_S = 10.0
"""It listens sooner."""
STOP_S = 10.0
"""Its server ends when the last client has, and this one's clients are gone when it is stopped."""
_LOOK_S = 0.05


def mps_line(*, is_on: bool) -> str:
    """What was chosen, and what it costs; measured on an H200 at 8B, docs/decisions.md."""
    if is_on:
        return (
            "mps=on: target and draft share the device without time slices, at 8B on an H200 as fast as without; a"
            " worker that dies takes target, draft and memory service down with it, and the cache is cold after it"
        )
    return (
        "mps=off: target and draft take turns in time slices; a worker that dies takes nobody down, and the cache"
        " stays warm"
    )


class MpsDaemon:
    """The daemon of one run; use it in a `with`."""

    def __init__(self, run_dir: Path, program: str = CONTROL) -> None:
        self._pipes, self._logs = run_dir / "mps", run_dir / "mps-log"
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self.env: Mapping[str, str] = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(self._logs),
        }
        """What its clients find it by."""

    def __enter__(self) -> "MpsDaemon":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Raises ValueError, with the end of its log, if there is no such program or it does not come up."""
        # One that was killed has left its pipes.
        shutil.rmtree(self._pipes, ignore_errors=True)
        for folder in (self._pipes, self._logs):
            folder.mkdir(mode=0o700, exist_ok=True)
        supervisor = os.getpid()
        try:
            # In the foreground, so that it is a child and ends with this process, however that ends.
            self._process = subprocess.Popen(
                [self._program, "-f"],
                env=os.environ | self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=lambda: die_with(supervisor),
            )
        except OSError as error:
            raise ValueError(f"--mps is on, but {self._program} cannot be started: {error}") from error
        end = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() >= end:
                self.stop()
                raise ValueError(f"--mps is on, but the daemon does not come up; its log ends: {self._log_end()}")
            time.sleep(_LOOK_S)
        logger.info("mps daemon pid=%d pipes=%s", self._process.pid, self._pipes)

    def restart(self) -> None:
        """After a client died, it takes no new ones."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """End it, and its server with it. Nothing happens if it does not run."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        self._tell("quit")
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            logger.warning("mps daemon does not quit, killing it pid=%d", process.pid)
            # The server is in its group.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _answers(self) -> bool:
        return self._tell("get_server_list")

    def _tell(self, command: str) -> bool:
        try:
            done = subprocess.run(
                [self._program], input=f"{command}\n".encode(), env=os.environ | self.env, capture_output=True,
                timeout=STOP_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _log_end(self) -> str:
        file = self._logs / "control.log"
        lines = file.read_text("utf-8", "replace").splitlines()[-3:] if file.is_file() else []
        return " | ".join(lines) or "it has none"
