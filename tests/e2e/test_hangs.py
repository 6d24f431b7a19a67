"""Real processes that stop in their tracks: told by /health, killed and replaced, and no request lost."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.embedded_model import EMBEDDED, OPENINGS
from tests.support.served import PLAIN, Served, chat

pytestmark = pytest.mark.slow

FLAGS = ["--model-path", str(EMBEDDED), "--dtype", "float32", "--threads", "1", "--mem-bytes", "64M"]
BODY = chat(OPENINGS[1], temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served([*FLAGS, "--hang-timeout-s", "11"]) as served:
        yield served


def reasons(server: Served) -> list[str]:
    """What keeps /health from 200."""
    with httpx.Client(base_url=server.url, timeout=60, verify=PLAIN) as client:
        return client.get("/health").json().get("reasons", [])


def wait_for_health(server: Served, text: str) -> None:
    """Until a reason holds the text, or until there is none for an empty one."""
    while (text not in " ".join(reasons(server))) if text else reasons(server):
        time.sleep(0.05)


def test_a_busy_server_is_never_silent(server: Served) -> None:
    ends = time.monotonic() + 11
    while time.monotonic() < ends:
        server.chat_all([BODY] * 4, 4)
        assert reasons(server) == []


@pytest.mark.parametrize("role", ["target", "draft", "tokenizer", "memsvc"])
def test_a_stopped_process_is_named_by_health_then_replaced_and_requests_are_answered(
    server: Served, role: str
) -> None:
    (wanted,) = server.chat_all([BODY], 1)
    pid = server.child(role)
    os.kill(pid, signal.SIGSTOP)
    answers = []
    asked = threading.Thread(target=lambda: answers.extend(server.chat_all([BODY], 1)))
    asked.start()
    wait_for_health(server, f"{role} gives no sign of life")
    asked.join()
    assert [answer.text for answer in answers] == [wanted.text]
    wait_for_health(server, "")
    assert server.child(role) != pid
    assert [line for line in server.lines if f"hangs role={role} pid={pid}" in line]
    # The target may have been waiting for it; whoever had nothing to do gave signs of life all the time.
    silent = {line.split("role=")[1].split()[0] for line in server.lines if "no sign of life" in line}
    assert "front" not in silent
    if role in ("target", "draft"):
        assert silent <= {"target", "draft"}
