"""The fake draft as a process, with the faults it can be told to have."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from memsvc.rpc import Rpc
from memsvc.wire.base import WIRE_VERSION, Epoch, ReqId, pack_tokens, unpack_tokens
from memsvc.wire.links import SPEC
from memsvc.wire.spec import DraftHello, DraftOpen, DraftReady, Propose
from memsvc.wire.text import Sampling
from tests.support.memsvc_process import ROOT

TIMEOUT_S = 60.0
HELLO = DraftHello(WIRE_VERSION, "main", Epoch(1), 8, "float32")
BLOCK = Propose(
    [], [DraftOpen(ReqId(1), 0, 0, [], 2, pack_tokens([5, 6]), Sampling(seed=1, max_tokens=9))],
    [], [], [], [], [], [], [], [], 3, [ReqId(1)], [6], [1], [b""],
)  # fmt: skip
AGAIN = msgspec.structs.replace(BLOCK, opens=[])


@contextmanager
def fake_draft(tmp_path: Path, **options: Any) -> Iterator[tuple[subprocess.Popen[bytes], Rpc]]:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    (tmp_path / "answers.json").write_text(json.dumps([[5, 6, 7, 8, 9]]))
    config = {"run_dir": str(run_dir), "continuations": str(tmp_path / "answers.json"), "block_size": 4} | options
    (tmp_path / "fake.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "tests.support.fake_draft", "--config", str(tmp_path / "fake.json")]
    with zmq.Context() as context, subprocess.Popen(command, cwd=ROOT) as process:
        rpc = Rpc(context, SPEC, run_dir)
        try:
            yield process, rpc
        finally:
            rpc.close()
            process.kill()


def test_it_answers_and_stops_on_sigterm(tmp_path):
    with fake_draft(tmp_path) as (process, rpc):
        ready = rpc.call(HELLO, TIMEOUT_S)
        assert isinstance(ready, DraftReady)
        assert (ready.pid, ready.block_size, ready.target_layer_ids) == (process.pid, 4, [])
        assert unpack_tokens(rpc.call(BLOCK, TIMEOUT_S).token_ids) == [7, 8, 9]
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_it_answers_one_propose_with_garbage_and_the_next_one_properly(tmp_path):
    with fake_draft(tmp_path, garbage_at=1) as (_, rpc):
        rpc.call(HELLO, TIMEOUT_S)
        with pytest.raises(msgspec.DecodeError):
            rpc.call(BLOCK, TIMEOUT_S)
        assert unpack_tokens(rpc.call(AGAIN, TIMEOUT_S).token_ids) == [7, 8, 9]


def test_it_dies_without_a_word_after_the_number_asked_for(tmp_path):
    with fake_draft(tmp_path, die_after=1) as (process, rpc):
        rpc.call(HELLO, TIMEOUT_S)
        rpc.call(BLOCK, TIMEOUT_S)
        rpc.send(AGAIN)
        assert process.wait(TIMEOUT_S) == 9
        assert not os.path.exists(f"/proc/{process.pid}")
