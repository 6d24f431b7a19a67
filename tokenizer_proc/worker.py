"""The loop of the tokenizer process: sockets on one side, TextService on the other."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from memsvc.heart import BEAT_S
from memsvc.inbox import PullInbox
from memsvc.process import StopFlag
from memsvc.transport import bind, connect
from memsvc.wire.links import FRONT_TOK, TARGET_TOK, TOK_FRONT, TOK_TARGET
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import PromptEncoder
from tokenizer_proc.encode_threads import EncodeThreads
from tokenizer_proc.outbox import Outbox
from tokenizer_proc.service import TextService

logger = logging.getLogger(__name__)

_FRONT_PER_TURN = 4
"""Messages of the front between two looks at the target: each may cost a millisecond of encoding."""
_TARGET_PER_TURN = 64
_TICK_MS = int(BEAT_S * 1000)
_CLOSE_LINGER_MS = 500


class Sockets:
    """The four sockets of the process."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: Path) -> None:
        self.front_in = PullInbox(bind(context, FRONT_TOK, run_dir), FRONT_TOK)
        self.target_in = PullInbox(bind(context, TARGET_TOK, run_dir), TARGET_TOK)
        self.target_out = Outbox(connect(context, TOK_TARGET, run_dir))
        self.front_out = Outbox(connect(context, TOK_FRONT, run_dir))


class TokenizerWorker:
    """One turn handles what has arrived and sends one TextOut for all of it."""

    def __init__(
        self, config: TokenizerConfig, encoder: PromptEncoder, sockets: Sockets, threads: EncodeThreads
    ) -> None:
        self._sockets = sockets
        self._threads = threads
        self._encoder = encoder
        self._service = TextService(config, encoder, threads.start)

    def lines(self) -> list[str]:
        """What an operator reads at start."""
        return self._encoder.lines()

    def num_device_bytes(self) -> int:
        """See Serving."""
        return 0

    def meet(self, stop: StopFlag) -> None:
        """Nobody: what it sends waits for whom it is for."""

    def run(self, stop: StopFlag, beat: Callable[[], None]) -> None:
        """Serve until stop is set; then what has arrived is still handled. Every turn calls beat."""
        poller = zmq.Poller()
        for readable in (self._sockets.front_in.socket, self._sockets.target_in.socket, self._threads.fd, stop.fd):
            poller.register(readable, zmq.POLLIN)
        self._service.start()
        self.turn()
        while not stop.is_set:
            beat()
            self._wait(poller)
            self.turn()
        while self.turn():
            pass
        logger.info("stop open_requests=%d", self._service.num_reqs)

    def turn(self) -> bool:
        """Handle what is there without waiting for anything. False if nothing was."""
        num_handled = self._from_target() + self._from_front()
        for rid, result in self._threads.take():
            self._service.on_encoded(rid, result)
            num_handled += 1
        self._service.on_time(time.monotonic())
        to_front, to_target = self._service.outgoing.take()
        for msg in to_target:
            self._sockets.target_out.send(msg)
        for msg in to_front:
            self._sockets.front_out.send(msg)
        return num_handled > 0

    def _wait(self, poller: zmq.Poller) -> None:
        """Until a socket has something, or one that was full can take more."""
        for outbox in (self._sockets.front_out, self._sockets.target_out):
            outbox.flush()
            poller.register(outbox.socket, zmq.POLLOUT if outbox.is_waiting else 0)
        poller.poll(_TICK_MS)

    def _from_front(self) -> int:
        for num in range(_FRONT_PER_TURN):
            msg = self._sockets.front_in.recv()
            if msg is None:
                return num
            self._service.on_front(msg)
        return _FRONT_PER_TURN

    def _from_target(self) -> int:
        inbox = self._sockets.target_in
        for num in range(_TARGET_PER_TURN):
            msg = inbox.recv()
            if msg is None:
                return num
            try:
                self._service.on_target(msg)
            except ValueError as error:
                inbox.bad_frames.count(str(error))
        return _TARGET_PER_TURN


@contextmanager
def open_worker(config: TokenizerConfig) -> Iterator[TokenizerWorker]:
    """A worker with its sockets and threads. Raises ValueError or zmq.ZMQError if they can't be had."""
    encoder = PromptEncoder(config)
    context = zmq.Context()
    threads = EncodeThreads(encoder.encode, config.encode_threads)
    try:
        yield TokenizerWorker(config, encoder, Sockets(context, Path(config.run_dir)), threads)
    finally:
        threads.close()
        # What was sent last still gets half a second to leave.
        context.destroy(_CLOSE_LINGER_MS)
