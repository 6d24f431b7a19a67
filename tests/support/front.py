"""A real front process on a loopback port, with the fake engine around it, and an HTTP client that runs beside the test."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from launch.http.config import API_KEY_ENV, FrontConfig
from memsvc.wire.control import Ready
from memsvc.wire.text import AbortAll
from tests.support.fake_engine import NEEDS, WAIT_MS, FakeEngine

ROOT = Path(__file__).parents[2]
_WAIT_S = WAIT_MS / 1000


@dataclass(frozen=True, kw_only=True)
class RunningFront:
    """A front that serves."""

    engine: FakeEngine
    process: subprocess.Popen[bytes]
    client: httpx.Client
    pool: ThreadPoolExecutor

    def post(self, path: str, **body: Any) -> "Future[httpx.Response]":
        """POST JSON in another thread, so that the test can play the engine meanwhile."""
        return self.pool.submit(self.client.post, path, json=body)

    def get(self, path: str) -> "Future[httpx.Response]":
        """GET in another thread."""
        return self.pool.submit(self.client.get, path)

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{re.escape(name)}[{{ ]", line))

    def wait_for_metric(self, name: str, value: float) -> None:
        """Until the front has read what makes the metric that value; AssertionError after ten seconds."""
        deadline = time.monotonic() + 10
        while (found := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}"

    def stream(self, path: str, **body: Any) -> "Events":
        """POST with stream: true."""
        return Events(self.client, path, {"stream": True, **body})


class Events:
    """Server-sent events of one answer, read by a thread of its own."""

    def __init__(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        self.status: int = 0
        self.headers: dict[str, str] = {}
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._hang_up = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(client, path, body), daemon=True)
        self._thread.start()

    def _read(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        try:
            with client.stream("POST", path, json=body) as response:
                self.status = response.status_code
                self.headers = dict(response.headers)
                for line in response.iter_lines():
                    if line:
                        self._queue.put(line)
                    if self._hang_up.is_set():
                        return
        finally:
            self._queue.put(None)

    def next(self) -> Any:
        """The next event: its JSON, the text "[DONE]", or None when the answer is over."""
        line = self._queue.get(timeout=_WAIT_S)
        if line is None:
            return None
        if not line.startswith("data: "):
            return msgspec.json.decode(line)
        data = line.removeprefix("data: ")
        return data if data == "[DONE]" else msgspec.json.decode(data)

    def rest(self) -> list[Any]:
        """All events up to the end."""
        events = []
        while (event := self.next()) is not None:
            events.append(event)
        self._thread.join(_WAIT_S)
        return events

    def hang_up_at_next_event(self) -> None:
        """Close the connection once one more line has come."""
        self._hang_up.set()


def text_of(events: list[Any]) -> str:
    """The text of chat or completion chunks, joined."""
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def make_config(run_dir: Path, **overrides: Any) -> FrontConfig:
    """A config for tests; port 0 takes a free one."""
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model_path": "/models/toy",
        "served_model_names": ("toy", "toy-alias"),
        "context_len": 128,
        "port": 0,
        "drain_s": 0.2,
    }
    return FrontConfig(**{**values, **overrides})


def start_process(config: FrontConfig, api_key: str = "", pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """`python -m launch.http` with this config."""
    file = Path(config.run_dir) / f"front-{config.generation}.json"
    file.write_bytes(msgspec.json.encode(config))
    env = {**os.environ, "PYTHONPATH": str(ROOT), **({API_KEY_ENV: api_key} if api_key else {})}
    command = [sys.executable, "-m", "launch.http", "--config", str(file)]
    return subprocess.Popen(command, env=env, cwd=ROOT, pass_fds=pass_fds)


@contextmanager
def running_front(run_dir: Path, api_key: str = "", **overrides: Any) -> Iterator[RunningFront]:
    """A front that has said Ready. It must end with status 0 on SIGTERM."""
    config = make_config(run_dir, requires_key=bool(api_key), **overrides)
    with FakeEngine(run_dir) as engine, ThreadPoolExecutor(16) as pool:
        process = start_process(config, api_key)
        try:
            engine.peer_list()
            for role in NEEDS:
                engine.peer_up(role)
            engine.expect(AbortAll)
            ready = engine.expect_launch(Ready)
            headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
            url = ready.lines[0].removeprefix("url=")
            with httpx.Client(base_url=url, headers=headers, timeout=_WAIT_S, trust_env=False) as client:
                yield RunningFront(engine=engine, process=process, client=client, pool=pool)
            # A test may have killed it, and then started another in its place.
            if process.poll() != -signal.SIGKILL:
                process.terminate()
                assert process.wait(_WAIT_S) == 0
        finally:
            process.kill()
            process.wait()
