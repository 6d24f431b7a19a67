"""The real process between a front and a target that the test plays."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tokenizers import Tokenizer

from memsvc.transport import bind, connect, make_run_dir
from memsvc.wire.base import FinishReason, ReqId, pack_tokens, unpack_tokens
from memsvc.wire.codec import decoder, encode
from memsvc.wire.control import Alive, Fatal, Ready
from memsvc.wire.links import ALL_LAUNCH, FRONT_TOK, MAX_MSG_BYTES, TARGET_TOK, TOK_FRONT, TOK_TARGET, Link
from memsvc.wire.text import (
    Abort,
    AbortAll,
    Accepted,
    Admit,
    ChatMessage,
    ChatPrompt,
    Failed,
    Sampling,
    Submit,
    TextOut,
    TextPrompt,
    TokenPrompt,
    TokensOut,
    Usage,
)
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from tokenizer_proc.config import TokenizerConfig

WAIT_MS = 30_000
GREEDY = Sampling(seed=0, max_tokens=20)


class Neighbours:
    """Front, target and supervisor of one tokenizer process."""

    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        self.context = context
        self.model_dir = folder / "model"
        self.run_dir = folder / "run"
        make_run_dir(self.run_dir)
        self.tokenizer: Tokenizer = write_tiny_tokenizer(self.model_dir)
        self.launch = bind(context, ALL_LAUNCH, self.run_dir)
        self.front_in = bind(context, TOK_FRONT, self.run_dir)
        self.target_in = bind(context, TOK_TARGET, self.run_dir)
        self.front_out = connect(context, FRONT_TOK, self.run_dir)
        self.target_out = connect(context, TARGET_TOK, self.run_dir)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        config = TokenizerConfig(
            run_dir=str(self.run_dir), model_path=str(self.model_dir), context_len=1_000_000, abort_timeout_s=0.0
        )
        path = self.run_dir / "tokenizer.json"
        path.write_bytes(msgspec.json.encode(config))
        process = subprocess.Popen([sys.executable, "-m", "tokenizer_proc", "--config", str(path)])
        self.processes.append(process)
        return process

    def read(self, socket: zmq.Socket[Any], link: Link) -> Any:
        assert socket.poll(WAIT_MS), f"nothing on {link.name}"
        return decoder(link.there).decode(socket.recv())

    def said_at_start(self) -> Ready | Fatal:
        while isinstance(msg := self.read(self.launch, ALL_LAUNCH), Alive):
            pass  # a process that was killed has left some
        return msg

    def serve(self) -> subprocess.Popen[bytes]:
        """Start a process; it serves when this returns."""
        process = self.start()
        ready = self.said_at_start()
        assert isinstance(ready, Ready)
        assert (ready.role, ready.pid) == ("tokenizer", process.pid)
        # Whatever the target still runs belongs to a life that is over.
        assert self.at_target() == AbortAll()
        return process

    def from_tokenizer(self) -> Any:
        return self.read(self.front_in, TOK_FRONT)

    def at_target(self) -> Any:
        return self.read(self.target_in, TOK_TARGET)

    def submit(self, rid: int, prompt: ChatPrompt | TextPrompt | TokenPrompt, **fields: Any) -> None:
        self.front_out.send(encode(Submit(ReqId(rid), prompt, GREEDY, **fields)))

    def tokens(self, rid: int, text: str, usage: Usage | None = None) -> None:
        finish, usages = (FinishReason.LENGTH, [usage]) if usage else (FinishReason.RUNNING, [])
        packed = pack_tokens(self.tokenizer.encode(text).ids)
        self.target_out.send(encode(TokensOut([ReqId(rid)], [packed], [finish], usages)))

    def admit(self, rid: int, text: str, **fields: Any) -> Admit:
        self.submit(rid, TextPrompt(text), **fields)
        admit = self.at_target()
        assert self.from_tokenizer() == Accepted(ReqId(rid), admit.prompt_len)
        return admit


@pytest.fixture
def neighbours(tmp_path: Path) -> Iterator[Neighbours]:
    context = zmq.Context()
    made = Neighbours(context, tmp_path)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait()
        context.destroy(0)


def test_a_chat_goes_through_and_sigterm_ends_the_process(neighbours: Neighbours) -> None:
    process = neighbours.serve()
    neighbours.submit(1, ChatPrompt([ChatMessage("user", "the ox")]), stop=["9"])
    admit = neighbours.at_target()
    text = "<|im_start|>user\nthe ox<|im_end|>\n<|im_start|>assistant\n"
    assert unpack_tokens(admit.token_ids) == neighbours.tokenizer.encode(text).ids
    assert neighbours.from_tokenizer() == Accepted(ReqId(1), admit.prompt_len)
    neighbours.tokens(1, "caf\u00e9 9 more")
    out = neighbours.from_tokenizer()
    assert out.texts == ["caf\u00e9 "]
    assert neighbours.at_target() == Abort(ReqId(1))
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_garbage_on_every_socket_changes_nothing(neighbours: Neighbours) -> None:
    neighbours.serve()
    neighbours.admit(1, "ox")
    for socket in (neighbours.front_out, neighbours.target_out):
        for frames in (
            [b""],
            [b"\xff" * 9],
            [b"a", b"b"],
            [os.urandom(1000)],
            [encode(Failed(ReqId(1), "a", "b"))[:-1]],
        ):
            socket.send_multipart(frames)
    # A prompt that is no UTF-8, one frame too many, columns of different lengths, tokens cut in the middle.
    neighbours.front_out.send(encode(Submit(ReqId(2), TextPrompt("@@@"), GREEDY)).replace(b"@@@", b"\xff\xfe@"))
    neighbours.front_out.send_multipart([encode(Abort(ReqId(1))), b""])
    neighbours.target_out.send(encode(TokensOut([ReqId(1)], [b""], [FinishReason.STOP])))
    neighbours.target_out.send(encode(TokensOut([ReqId(1)], [b"123"], [FinishReason.RUNNING])))
    neighbours.tokens(1, "the end", Usage(1, 2, 0))
    out = neighbours.from_tokenizer()
    assert (out.texts, out.finished) == (["the end"], [FinishReason.LENGTH])
    assert neighbours.processes[0].poll() is None


def test_a_frame_past_the_limit_closes_its_connection_only(neighbours: Neighbours) -> None:
    neighbours.serve()
    neighbours.admit(1, "ox")
    # Not the process' own target: a stranger on the same socket.
    with connect(neighbours.context, TARGET_TOK, neighbours.run_dir) as stranger:
        stranger.send(b"\0" * (MAX_MSG_BYTES + 1))
        neighbours.tokens(1, "the end", Usage(1, 2, 0))
        assert neighbours.from_tokenizer().texts == ["the end"]


def test_a_long_prompt_lets_other_streams_go_on(neighbours: Neighbours) -> None:
    neighbours.serve()
    neighbours.admit(1, "ox")
    text = "un the ox sta, 12. " * 15_000
    neighbours.submit(2, TextPrompt(text))
    neighbours.submit(3, TextPrompt("ox"))
    neighbours.tokens(1, "the end", Usage(1, 2, 0))
    first = [neighbours.from_tokenizer() for _ in range(3)]
    assert {type(msg) for msg in first[:2]} == {Accepted, TextOut}
    assert first[2].rid == 2
    admits = {admit.rid: admit for admit in (neighbours.at_target(), neighbours.at_target())}
    assert unpack_tokens(admits[ReqId(2)].token_ids) == neighbours.tokenizer.encode(text).ids


def test_requests_that_cannot_be_served_are_answered_with_numbers(neighbours: Neighbours) -> None:
    neighbours.serve()
    for rid, prompt, reason in (
        (1, TextPrompt(""), "0 tokens"),
        (2, TokenPrompt(pack_tokens([1, 512])), "token id 512"),
        (3, TokenPrompt(pack_tokens([1] * 999_981)), "999981 tokens plus max_tokens 20 is 1000001"),
        (4, ChatPrompt([]), "0 messages"),
    ):
        neighbours.submit(rid, prompt)
        failed = neighbours.from_tokenizer()
        assert (failed.rid, failed.kind) == (rid, "bad_request")
        assert reason in failed.message


def test_an_abort_that_no_target_answers_still_ends_the_request(neighbours: Neighbours) -> None:
    neighbours.serve()
    neighbours.admit(1, "ox")
    neighbours.front_out.send(encode(Abort(ReqId(1))))
    assert neighbours.at_target() == Abort(ReqId(1))
    out = neighbours.from_tokenizer()
    assert (out.rids, out.finished) == ([1], [FinishReason.ABORT])


def test_a_killed_process_starts_again_and_a_resumed_stream_goes_on(neighbours: Neighbours) -> None:
    neighbours.serve()
    neighbours.admit(1, "ox", stop=["never"])
    neighbours.tokens(1, "the n")
    out = neighbours.from_tokenizer()
    assert out.texts == ["the "]
    neighbours.processes[0].kill()
    neighbours.processes[0].wait()
    neighbours.serve()
    # The front does not know where the old one stopped, only what came through.
    admit = neighbours.admit(2, "ox", stop=["never"], resumed=out.token_ids[0])
    assert unpack_tokens(admit.token_ids)[admit.prompt_len :] == neighbours.tokenizer.encode("the n").ids
    neighbours.tokens(1, "late")
    assert neighbours.at_target() == Abort(ReqId(1))
    neighbours.tokens(2, "ow", Usage(1, 4, 0))
    assert neighbours.from_tokenizer().texts == ["now"]


def test_a_folder_without_tokenizer_is_fatal_and_says_why(neighbours: Neighbours) -> None:
    (neighbours.model_dir / "tokenizer.json").unlink()
    process = neighbours.start()
    fatal = neighbours.said_at_start()
    assert isinstance(fatal, Fatal)
    assert "has no tokenizer.json" in fatal.message
    assert process.wait(30) == 1


def test_the_process_loads_no_torch() -> None:
    code = "import tokenizer_proc.__main__, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
