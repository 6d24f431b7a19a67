"""The front without sockets and HTTP: starts calls, routes output to them, sends them again after a restart."""

import logging
import time
from typing import Protocol

from launch.http.calls import Call
from launch.http.config import FrontConfig
from launch.http.errors import ApiError
from launch.http.generation import Generation
from launch.http.journal import MAX_DEATHS, Entry, Journal
from launch.http.peers import Peers
from launch.http.tally import Tally
from memsvc.wire.base import FinishReason, ReqId
from memsvc.wire.codec import encode
from memsvc.wire.control import PeerDown, PeerList, PeerSilent, PeerUp, ToFront
from memsvc.wire.links import MAX_MSG_BYTES
from memsvc.wire.text import Abort, AbortAll, Accepted, EngineStats, Failed, FrontToTok, TextOut, TokToFront

logger = logging.getLogger(__name__)

# Requests in flight end with either of these two, so after a new start of one they are sent again.
_HOLD_REQUESTS = ("tokenizer", "target")
# A request may be what they died of; the model goes by one name, since the one takes the other down.
_MAY_DIE_OF_REQUESTS = {"memsvc": "model", "target": "model", "tokenizer": "tokenizer"}


class TokSender(Protocol):
    """The way to the tokenizer."""

    def send(self, msg: FrontToTok) -> None:
        """Queue a message; never blocks."""

    def reopen(self) -> None:
        """Drop what waits for a tokenizer that is gone; what is sent from now on is for the next one."""


class Engine:
    """One per front. `start` makes a call, `on_*` take what other processes say, `abort` ends a call early.

    A call may be started while a needed process is down: it is sent as soon as all are back.
    """

    def __init__(self, config: FrontConfig, tokenizer: TokSender, tally: Tally) -> None:
        self.config = config
        self.peers = Peers(config.needs, config.generation)
        self.journal = Journal(config.generation)
        self.tally = tally
        self.stats: EngineStats | None = None
        """The target's counters, None until it has sent some."""
        self._tokenizer = tokenizer
        # A front that starts takes the place of one that may have left requests behind.
        self._must_resubmit = True
        # What has died since requests were last sent, and may have died of them.
        self._died: set[str] = set()
        self.is_stopping = False
        """No new calls are taken."""

    def start(self, generation: Generation) -> Call:
        """Put a request on its way. Raises ApiError 429 past the limits, 400 if it can never fit, 503 while stopping."""
        if self.is_stopping:
            raise ApiError(503, "the server is stopping")
        waiting, limit = len(self.journal), self.config.max_live_requests
        if generation.num_choices > limit:
            num = len(generation.prompts)
            asked = f"{num} prompts times n={generation.num_per_prompt} are {generation.num_choices} choices"
            raise ApiError(400, f"{asked}, this server can hold {limit} at once", "n" if num == 1 else "prompt")
        if waiting + generation.num_choices > limit:
            asked = f"{waiting} requests are running or waiting and this one has {generation.num_choices}"
            raise self._turned_away(f"{asked}, limit {limit}")
        call = Call(generation)
        entries = [self._entry(call, index) for index in range(generation.num_choices)]
        num_bytes = self.journal.num_bytes + sum(entry.num_prompt_bytes for entry in entries)
        if num_bytes > self.config.max_journal_bytes:
            raise self._turned_away(
                f"requests in flight would hold {num_bytes} bytes, limit {self.config.max_journal_bytes}"
            )
        for entry in entries:
            self.journal.add(entry)
            if self.is_serving:
                self._send(entry)
        return call

    def abort(self, call: Call) -> None:
        """End what still runs of a call. Nothing happens if all of it ended."""
        for entry in self.journal.of_call(call):
            self._forget(entry, FinishReason.ABORT)
            if self.is_serving:
                self._tokenizer.send(Abort(entry.rid))

    def stop(self) -> None:
        """Take no new calls."""
        self.is_stopping = True

    def fail_all(self, message: str) -> None:
        """End every call with an error."""
        for entry in self.journal:
            self._fail(entry, ApiError(503, message))

    @property
    def is_serving(self) -> bool:
        """Whether every needed process is up and requests go straight on."""
        return not self._must_resubmit and not self.peers.missing

    def on_text(self, msg: TokToFront) -> None:
        """Output, or the end of a request without any."""
        match msg:
            case Accepted(rid, prompt_tokens):
                entry = self.journal.get(rid)
                if entry is not None:
                    entry.choice.prompt_tokens = prompt_tokens
            case TextOut():
                self._on_text_out(msg)
            case Failed(rid, kind):
                entry = self.journal.get(rid)
                if entry is not None:
                    # Its text is for the client alone: it may name a token of the prompt.
                    logger.info("request failed rid=%d kind=%s", rid, kind)
                    self._fail(entry, ApiError.from_failed(msg))

    def on_stats(self, stats: EngineStats) -> None:
        """The target's counters."""
        self.stats = stats

    def on_peer(self, msg: ToFront) -> None:
        """How all are at first, then each that started, ended, or gives no sign of life."""
        match msg:
            case PeerList(generations, up, silent):
                self.peers.know(generations)
                for role in up:
                    self.on_peer(PeerUp(role, generations[role]))
                for role in silent:
                    self.on_peer(PeerSilent(role))
            case PeerUp(role, generation):
                if self.peers.up(role, generation):
                    self._must_resubmit |= role in _HOLD_REQUESTS
                    self._died |= {_MAY_DIE_OF_REQUESTS[role]} if role in _MAY_DIE_OF_REQUESTS else set()
                logger.info("peer up role=%s generation=%d missing=%s", role, generation, self.peers.missing)
                if self._must_resubmit and not self.peers.missing:
                    self._resubmit()
            case PeerDown(role):
                self.peers.down(role)
                match role:
                    case "target":
                        self.stats = None
                    case "tokenizer":
                        # The next one must not be given what this one did not read: it will be sent again.
                        self._tokenizer.reopen()
                logger.info("peer down role=%s requests=%d", role, len(self.journal))
            case PeerSilent(role):
                self.peers.silent(role)
                logger.warning("peer silent role=%s requests=%d", role, len(self.journal))

    def _resubmit(self) -> None:
        self._must_resubmit = False
        self._tokenizer.send(AbortAll())
        for died in sorted(self._died):
            self._fail_suspects(died)
        self._died.clear()
        entries = self.journal.renumber()
        for entry in entries:
            self._send(entry)
        logger.info("serving requests_sent=%d", len(entries))

    def _fail_suspects(self, died: str) -> None:
        for entry in self.journal:
            if entry.is_suspect_after_death(died) and entry.call.error is None:
                logger.error("request not sent again rid=%d died=%s deaths=%d tokens=%d", entry.rid, died, MAX_DEATHS,
                             len(entry.tokens) // 4)  # fmt: skip
                error = ApiError(
                    500,
                    f"internal error: the {died} process died {MAX_DEATHS} times while it worked on this request",
                    may_retry=False,
                )
                # A sibling would bring the same prompt back.
                for sibling in self.journal.of_call(entry.call):
                    self._fail(sibling, error)

    def _send(self, entry: Entry) -> None:
        entry.is_sent = True
        self._tokenizer.send(entry.submit())

    def _on_text_out(self, msg: TextOut) -> None:
        now = time.monotonic()
        num_ended = 0
        for rid, text, tokens, finish in zip(msg.rids, msg.texts, msg.token_ids, msg.finished, strict=True):
            entry = self.journal.get(rid)
            has_ended = finish is not FinishReason.RUNNING
            if entry is None:
                self._on_unknown(rid, has_ended)
            else:
                self.journal.extend(entry, tokens)
                self.tally.tokens(entry.call.started_at, entry.choice, len(tokens) // 4, now)
                entry.choice.put(text, len(tokens) // 4, now)
                if has_ended:
                    entry.choice.end(finish, msg.usages[num_ended], msg.stops[num_ended] if msg.stops else "")
                    self._end(entry, finish)
                entry.call.wake()
            num_ended += has_ended

    def _on_unknown(self, rid: ReqId, has_ended: bool) -> None:
        # Left from before a restart, or the client has gone while the output was on its way.
        if not has_ended and self.is_serving:
            self._tokenizer.send(Abort(rid))

    def _end(self, entry: Entry, finish: FinishReason) -> None:
        self._forget(entry, finish)
        if finish in (FinishReason.ABORT, FinishReason.ERROR):
            self._fail(entry, ApiError(500, f"the server ended the request with {finish.value!r}"))

    def _fail(self, entry: Entry, error: ApiError) -> None:
        self._forget(entry, FinishReason.ERROR)
        # The choices of one call stand or fall together: its answer aborts the others.
        entry.call.fail(error)

    def _forget(self, entry: Entry, finish: FinishReason) -> None:
        if self.journal.get(entry.rid) is entry:
            self.journal.remove(entry)
            self.tally.ended(entry.call.started_at, entry.choice, finish)

    def _entry(self, call: Call, index: int) -> Entry:
        generation = call.generation
        entry = Entry(
            rid=self.journal.new_rid(),
            call=call,
            choice=call.choices[index],
            prompt=generation.prompts[index // generation.num_per_prompt],
            sampling=generation.sampling_of(index),
        )
        entry.num_prompt_bytes = len(encode(entry.submit()))
        if entry.num_prompt_bytes > MAX_MSG_BYTES:
            raise ApiError(400, f"the prompt takes {entry.num_prompt_bytes} bytes, limit {MAX_MSG_BYTES}", "prompt")
        return entry

    def _turned_away(self, reason: str) -> ApiError:
        self.tally.turned_away += 1
        return ApiError(429, reason)
