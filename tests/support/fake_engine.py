"""Tokenizer, target, memory service and supervisor as one object in the test: it sees and says what they would.

Nothing happens by itself and nothing sleeps: a test takes the front's messages with `expect` and
answers them with `say`, `finish` and the rest, in the order it wants to check.
"""

import threading
from collections import Counter
from pathlib import Path
from typing import Any, Self, TypeVar

import zmq

from memsvc.inbox import PullInbox, RouterInbox
from memsvc.process import StopFlag
from memsvc.transport import bind, connect
from memsvc.wire import links
from memsvc.wire.admin import Check, CheckReport, Flush, GetStats, KindStats, Problem, Stats
from memsvc.wire.base import Done, FinishReason, Msg, PageId, ReqId, pack_tokens
from memsvc.wire.codec import encode
from memsvc.wire.control import Alive, PeerDown, PeerList, PeerSilent, PeerUp
from memsvc.wire.text import AbortAll, Accepted, EngineStats, Failed, Submit, TextOut, Usage

MsgT = TypeVar("MsgT", bound=Msg)

WAIT_MS = 10_000
"""How long anything may take before a test fails. Reached only by failing tests."""

NEEDS = ("memsvc", "target", "tokenizer")


STATS = Stats(
    num_frames=103, frame_bytes=3000, frames_dummy=1, frames_exchange=2, frames_empty=50,
    kinds=[
        KindStats("target_kv", 1000, 40, 120, num_free=20, num_private=60, num_tree=30, num_pinned=5, num_limbo=4,
                  num_quarantine=1),
        KindStats("draft_kv", 300, 10, 100, num_free=100, num_private=0, num_tree=0, num_pinned=0, num_limbo=0,
                  num_quarantine=0),
    ],
    num_reqs=3, elder=7, num_clients=2, hit_tokens=30, queried_tokens=120, draft_hit_short=1, evicted_pages=[6, 2],
    num_opens=9, num_closes={"finish": 5, "abort": 1}, num_no_room=2, num_too_large=1, num_steps=77,
    step_seconds=0.5, unusable_bytes=1234, num_bad_frames=4,
)  # fmt: skip

CHECK_REPORT = CheckReport(
    [Problem("draft_kv", PageId(17), "limbo", "rid 5", 2.5, "in no list")], 220, leaked_bytes=300
)


class FakeMemory:
    """Admin side of the memory service: a thread that answers GetStats, Check and Flush as if all were as in STATS."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: Path) -> None:
        self.num_flushes = 0
        self._inbox = RouterInbox(bind(context, links.MEM_ADMIN, run_dir), links.MEM_ADMIN)
        self._stop = StopFlag()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox.socket, zmq.POLLIN)
        poller.register(self._stop.fd, zmq.POLLIN)
        while not self._stop.is_set:
            poller.poll()
            received = self._inbox.recv()
            if received is not None:
                address, msg = received
                self.num_flushes += isinstance(msg, Flush)
                self._inbox.reply(address, _ANSWERS[type(msg)])

    def stop(self) -> None:
        """Answer nothing any more."""
        if not self._stop.is_set:
            self._stop.set()
            self._thread.join()
            self._stop.close()
            self._inbox.socket.close()


_ANSWERS: dict[type[Msg], Msg] = {GetStats: STATS, Check: CHECK_REPORT, Flush: Done()}


class FakeEngine:
    """Everything around a front in one run directory. Use it in a `with`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._launch = PullInbox(bind(self._context, links.ALL_LAUNCH, run_dir), links.ALL_LAUNCH)
        self.memory = FakeMemory(self._context, run_dir)
        self._to_front = connect(self._context, links.TOK_FRONT, run_dir)
        self._stats = connect(self._context, links.TARGET_FRONT, run_dir)
        self._peers = connect(self._context, links.LAUNCH_FRONT, run_dir)
        self._tokenizer: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._from_front = self._bind_front()
        self.generations: Counter[str] = Counter()
        """How often each process was started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.memory.stop()
        self._tokenizer.destroy(linger=0)
        self._context.destroy(linger=0)

    def _bind_front(self) -> PullInbox:
        return PullInbox(bind(self._tokenizer, links.FRONT_TOK, self.run_dir), links.FRONT_TOK)

    def peer_up(self, role: str) -> None:
        """The supervisor says that role serves, for the first time or after another restart."""
        self.generations[role] += 1
        self._peers.send(encode(PeerUp(role, self.generations[role])))

    def peer_list(self) -> None:
        """The supervisor tells a new front what there is: all that were started serve."""
        generations = dict.fromkeys(NEEDS, 0) | self.generations
        self._peers.send(encode(PeerList(generations, [role for role, num in generations.items() if num], [])))

    def peer_down(self, role: str) -> None:
        """The supervisor says that role is gone."""
        self._peers.send(encode(PeerDown(role)))

    def peer_silent(self, role: str) -> None:
        """The supervisor says that role gives no sign of life."""
        self._peers.send(encode(PeerSilent(role)))

    def peer_heard(self, role: str) -> None:
        """The supervisor says that role gives signs of life again."""
        self._peers.send(encode(PeerUp(role, self.generations[role])))

    def kill_tokenizer(self) -> None:
        """The tokenizer's socket goes away with all that was in it; nobody is connected to it when this returns."""
        # Closing a socket alone leaves the rest to a thread of its context.
        self._tokenizer.destroy(linger=0)

    def start_tokenizer(self) -> None:
        """A new one takes its place."""
        self._tokenizer = zmq.Context()
        self._from_front = self._bind_front()

    def expect(self, kind: type[MsgT]) -> MsgT:
        """The next message from the front, which must be of this kind."""
        return _expect(self._from_front, kind)

    def expect_launch(self, kind: type[MsgT]) -> MsgT:
        """The next message to the supervisor, signs of life apart."""
        while isinstance(msg := _expect(self._launch, Msg), Alive):
            pass
        assert isinstance(msg, kind), msg
        return msg

    def has_message(self, within_ms: int = 0) -> bool:
        """Whether the front has sent something that was not taken yet."""
        return bool(self._from_front.socket.poll(within_ms))

    def accept(self, submit: Submit, prompt_tokens: int = 7) -> None:
        """The prompt is encoded."""
        self._send(Accepted(submit.rid, prompt_tokens))

    def say(self, rid: ReqId, text: str, tokens: list[int] | None = None) -> None:
        """New text; one made-up token for each word unless told otherwise."""
        self._send(TextOut([rid], [text], [pack_tokens(_tokens(text, tokens))], [FinishReason.RUNNING]))

    def finish(
        self,
        rid: ReqId,
        text: str = "",
        reason: FinishReason = FinishReason.STOP,
        usage: Usage | None = None,
        stop: str = "",
    ) -> None:
        """The last text and the end."""
        usage = usage or Usage(7, len(text.split()), 0)
        packed = pack_tokens(_tokens(text, None))
        self._send(TextOut([rid], [text], [packed], [reason], [usage], [stop]))

    def fail(self, rid: ReqId, kind: str, message: str) -> None:
        """The request can't be served."""
        self._send(Failed(rid, kind, message))

    def stats(self, **counters: Any) -> None:
        """The target's counters; those not named are 0."""
        required = len(EngineStats.__struct_fields__) - len(EngineStats.__struct_defaults__)
        names = [
            name for name in EngineStats.__struct_fields__[:required] if name not in ("accepted_per_pos", "draft_up")
        ]
        zeros: dict[str, Any] = {**dict.fromkeys(names, 0), "accepted_per_pos": [], "draft_up": False}
        self._stats.send(encode(EngineStats(**{**zeros, **counters})))

    def garbage(self) -> None:
        """Frames that are no message, on every link to the front."""
        for socket in (self._to_front, self._stats, self._peers):
            socket.send(b"\xc1 not msgpack")
            socket.send_multipart([b"two", b"frames"])
            socket.send(encode(PeerDown("x")) if socket is not self._peers else encode(AbortAll()))

    def _send(self, msg: Msg) -> None:
        self._to_front.send(encode(msg))


def _tokens(text: str, tokens: list[int] | None) -> list[int]:
    return list(range(100, 100 + len(text.split()))) if tokens is None else tokens


def _expect(inbox: PullInbox, kind: type[MsgT]) -> MsgT:
    assert inbox.socket.poll(WAIT_MS), f"no message came, expected {kind.__name__}"
    msg = inbox.recv()
    assert isinstance(msg, kind), f"got {msg}, expected {kind.__name__}"
    return msg
