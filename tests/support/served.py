"""A whole server as users start it, for end-to-end tests: `python -m launch` in a process of its own."""

import asyncio
import json
import os
import queue
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from launch.child import die_with

READY_S = 120.0
REQUEST_S = 300.0
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Without certificates: everything here is plain HTTP, and reading them costs more than a request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got."""

    text: str
    finish_reason: str
    usage: dict[str, Any]
    speculative: dict[str, Any]
    """metrics.speculative_decoding, empty without speculation."""


@dataclass(slots=True)
class Served:
    """`with Served([...flags]) as server`: ready inside, stopped by Ctrl-C after it, and exit status 0 then."""

    flags: Sequence[str]
    module: str = "launch"
    env: dict[str, str] = field(default_factory=dict)
    ready_s: float = READY_S
    """It is given up if it does not serve by then."""
    ends_with: int = 0
    """Exit status at the end of the block."""
    log: Path | None = None
    """Gets every line when it comes, so that it is there whatever ends this process."""
    url: str = ""
    start_s: float = 0.0
    lines: list[str] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None
    _reader: threading.Thread | None = None
    _client: httpx.Client = field(init=False)

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", self.module, "--port", "0", *self.flags]
        started, parent = time.monotonic(), os.getpid()
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | self.env,
            start_new_session=True,
            # A killed bench would leave a server behind, with all memory of a device.
            preexec_fn=lambda: die_with(parent),
        )
        ready: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(ready,), daemon=True)
        self._reader.start()
        try:
            self.url = ready.get(timeout=self.ready_s)
        except queue.Empty:
            self.stop()
            raise AssertionError("not ready:\n" + "".join(self.lines[-40:])) from None
        if not self.url:
            self.stop()
            raise AssertionError("ended before it was ready:\n" + "".join(self.lines[-40:]))
        self.start_s = time.monotonic() - started
        self._client = httpx.Client(base_url=self.url, timeout=REQUEST_S, verify=PLAIN)
        return self

    def _read(self, ready: queue.Queue[str]) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as stdout, open(self.log or os.devnull, "w", encoding="utf-8", buffering=1) as log:
            for line in stdout:
                self.lines.append(line)
                log.write(line)
                if line.startswith("ready "):
                    ready.put(line.split()[1])
        ready.put("")

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        assert self._process is not None
        return self._process.pid

    def child(self, role: str) -> int:
        """pid of the newest process of that role."""
        starts = [line for line in self.lines if f"start role={role} pid=" in line]
        return int(starts[-1].split("pid=")[1].split()[0])

    def stop(self) -> int:
        """Ctrl-C; the exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            status = self._process.wait(30)
            assert self._reader is not None
            self._reader.join(10)
            return status
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError("did not stop within 30 s:\n" + "".join(self.lines[-40:])) from None

    def __exit__(self, exc_type: object, *_: object) -> None:
        status = self.stop()
        self._client.close()
        if exc_type is None:
            assert status == self.ends_with, f"exit status {status}:\n" + "".join(self.lines[-40:])

    def get(self, path: str) -> Any:
        """JSON of a GET."""
        return self._client.get(path).raise_for_status().json()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The answer to a POST, whatever its status."""
        return self._client.post(path, json=body)

    def check_idle(self) -> None:
        """Wait until nothing runs; then every page is free or in the tree, and the service's check finds nothing."""
        for _ in range(200):
            body = self.get("/check")
            if body["idle"] and not any(pages["limbo"] for pages in body["pages"].values()):
                break
            time.sleep(0.02)
        assert body["idle"], body
        assert body["problems"] == []
        assert body["leaked_bytes"] == 0
        for pages in body["pages"].values():
            assert pages["private"] == pages["quarantine"] == pages["limbo"] == 0, body

    def metrics(self) -> list[Sample]:
        """Every sample of /metrics."""
        families = text_string_to_metric_families(self._client.get("/metrics").raise_for_status().text)
        return [sample for family in families for sample in family.samples]

    def chat_all(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Answer]:
        """Chat completions of all bodies, `concurrency` at a time, in order."""
        return asyncio.run(self._chat_all(bodies, concurrency))

    async def _chat_all(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Answer]:
        gate = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_S, limits=limits, verify=PLAIN) as client:

            async def one(body: dict[str, Any]) -> Answer:
                async with gate:
                    reply = await client.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
                return read_answer(reply.json())

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(body)) for body in bodies]
        return [task.result() for task in tasks]


def read_answer(body: dict[str, Any]) -> Answer:
    """The one choice of a chat completion."""
    choice = body["choices"][0]
    speculative = (body.get("metrics") or {}).get("speculative_decoding") or {}
    return Answer(choice["message"]["content"], choice["finish_reason"], body["usage"], speculative)


def chat(text: str, **options: Any) -> dict[str, Any]:
    """A chat request; greedy unless told otherwise."""
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 64, **options}


def write_continuations(path: Path, sequences: Sequence[Sequence[int]]) -> None:
    """The file from which the perfect draft knows what comes."""
    path.write_text(json.dumps([list(sequence) for sequence in sequences]))
