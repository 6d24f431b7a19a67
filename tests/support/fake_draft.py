"""A draft process that knows how every answer goes on: `python -m tests.support.fake_draft --config FILE`.

It speaks the spec link like the real one, without a model, without torch, and with faults on demand.
"""

import argparse
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from memsvc.client import MemoryClient
from memsvc.heart import BEAT_S, Heart
from memsvc.inbox import RouterInbox
from memsvc.process import StopFlag, announce, install_sigterm
from memsvc.transport import bind
from memsvc.wire.base import BadRequest, Msg, ReqId, pack_tokens, unpack_tokens
from memsvc.wire.control import Ready
from memsvc.wire.links import SPEC
from memsvc.wire.spec import Drafted, DraftHello, DraftReady, Propose

GARBAGE = b"\xff\x00 not a message"


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeDraftConfig:
    """What the fake is told at start."""

    run_dir: str
    """Directory of the sockets."""
    continuations: str
    """JSON file: a list of token sequences, each a prompt with its answer."""
    block_size: int
    """B: the anchor and B - 1 drafts."""
    target_layer_ids: tuple[int, ...] = ()
    """Taps to ask the target for. Features are accepted and never read."""
    p_wrong: float = 0.0
    """Share of drafts that are made wrong on purpose, by a hash of seed, sequence and position."""
    seed: int = 0
    """Of that hash."""
    die_after: int = 0
    """Exit without a word on the first Propose after this many; 0 = never."""
    garbage_at: int = 0
    """Answer the Propose of this number, counted from 1, with bytes that are no message; 0 = never."""
    engine: str = ""
    """Register with the memory service as this engine's draft; empty = stay unknown to it."""
    announce: bool = False
    """Send Ready to the supervisor."""


@dataclass(slots=True)
class _Req:
    tokens: list[int]
    sequence: int = -1
    """Index of the continuation it follows, -1 if none is known to fit."""


@dataclass(slots=True)
class FakeDraft:
    """Answers messages; no sockets here."""

    config: FakeDraftConfig
    sequences: list[list[int]]
    num_proposes: int = 0
    reqs: dict[ReqId, _Req] = field(default_factory=dict)

    def hello(self) -> DraftReady:
        """Forget everything and say what is wanted."""
        self.reqs.clear()
        config = self.config
        return DraftReady(os.getpid(), os.getpid(), config.block_size, list(config.target_layer_ids))

    def propose(self, msg: Propose) -> Drafted | BadRequest:
        """The next num_drafts tokens of each request's continuation, zeros where none fits."""
        self.num_proposes += 1
        for rid in msg.closes:
            del self.reqs[rid]
        for opened in msg.opens:
            self.reqs[opened.rid] = _Req(unpack_tokens(opened.tokens))
        drafts: list[int] = []
        for rid, anchor, position, packed in zip(msg.rids, msg.anchors, msg.anchor_pos, msg.new_tokens, strict=True):
            req = self.reqs[rid]
            req.tokens += unpack_tokens(packed)
            if (len(req.tokens) - 1, req.tokens[-1]) != (position, anchor):
                return BadRequest(
                    f"rid {rid}: anchor {anchor} at {position}, tokens end with {req.tokens[-1]} at {len(req.tokens) - 1}"
                )
            drafts += self._next_tokens(req, msg.num_drafts)
        return Drafted(msg.num_drafts, pack_tokens(drafts))

    def _next_tokens(self, req: _Req, num: int) -> list[int]:
        if not self._fits(req, req.sequence):
            req.sequence = next((index for index in range(len(self.sequences)) if self._fits(req, index)), -1)
        if req.sequence < 0:
            return [0] * num
        at = len(req.tokens)
        known = self.sequences[req.sequence][at : at + num]
        return [
            token + 1 if self._is_wrong(req.sequence, at + index) else token
            for index, token in enumerate(known + [0] * (num - len(known)))
        ]

    def _fits(self, req: _Req, index: int) -> bool:
        return index >= 0 and self.sequences[index][: len(req.tokens)] == req.tokens

    def _is_wrong(self, sequence: int, position: int) -> bool:
        digest = hashlib.blake2b(f"{self.config.seed} {sequence} {position}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) < self.config.p_wrong * 2**32


def serve(config: FakeDraftConfig, stop: StopFlag) -> None:
    """Answer until stop is set."""
    run_dir = Path(config.run_dir)
    sequences = json.loads(Path(config.continuations).read_text(encoding="utf-8"))
    fake = FakeDraft(config, sequences)
    client = MemoryClient(run_dir, timeout_s=10.0) if config.engine else None
    if client is not None:
        client.register(config.engine, "draft", ["draft_kv"], "fake")
    with zmq.Context() as context, bind(context, SPEC, run_dir) as socket, Heart(run_dir, "draft") as heart:
        inbox = RouterInbox(socket, SPEC)
        if config.announce:
            announce(run_dir, Ready("draft", os.getpid(), ["a fake that knows the answers"]))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(stop.fd, zmq.POLLIN)
        while not stop.is_set:
            heart.beat()
            poller.poll(BEAT_S * 1000)
            received = inbox.recv()
            if received is not None:
                _answer(fake, client, inbox, *received)
    if client is not None:
        client.__exit__(None, None, None)


def _answer(fake: FakeDraft, client: MemoryClient | None, inbox: RouterInbox, address: list[bytes], msg: Any) -> None:
    config = fake.config
    reply: Msg
    if isinstance(msg, DraftHello):
        if client is not None:
            client.ack_epoch(msg.epoch)
        reply = fake.hello()
    else:
        if config.die_after and fake.num_proposes >= config.die_after:
            os._exit(9)
        reply = fake.propose(msg)
        if fake.num_proposes == config.garbage_at:
            inbox.socket.send_multipart([*address, GARBAGE])
            return
    inbox.reply(address, reply)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.fake_draft", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="JSON of FakeDraftConfig")
    config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=FakeDraftConfig)
    stop = StopFlag()
    install_sigterm(stop.set)
    serve(config, stop)


if __name__ == "__main__":
    main()
