"""State of the requests between front and target, without sockets: messages in, messages out."""

import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from memsvc.outline import trace
from memsvc.wire.base import FinishReason, ReqId, unpack_tokens
from memsvc.wire.text import Abort, AbortAll, Failed, FrontToTok, Submit, TargetToTok, TokenPrompt, TokensOut, Usage
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.decode import TextStream
from tokenizer_proc.encode import PromptEncoder, Text
from tokenizer_proc.outgoing import Outgoing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Req:
    """A request that the target has."""

    rid: ReqId
    prompt_len: int
    stream: TextStream
    includes_stop: bool


class TextService:
    """Every rid of a Submit gets exactly one terminal message, whatever comes in which order.

    encode_later is handed prompts too long to encode here; its results come back by on_encoded.
    """

    def __init__(
        self, config: TokenizerConfig, encoder: PromptEncoder, encode_later: Callable[[ReqId, Text], None]
    ) -> None:
        self.outgoing = Outgoing()
        self._config = config
        self._encoder = encoder
        self._encode_later = encode_later
        # A rid is in _encoding, then in _reqs; those whose end was asked for are in _ends_by too.
        self._encoding: dict[ReqId, Submit] = {}
        self._reqs: dict[ReqId, _Req] = {}
        self._ends_by: dict[ReqId, float] = {}

    @property
    def num_reqs(self) -> int:
        """Requests that still wait for their terminal message."""
        return len(self._encoding) + len(self._reqs)

    def start(self) -> None:
        """Have the target end what it still runs for a front or tokenizer that is gone, and know of nothing."""
        self._encoding.clear()
        self._reqs.clear()
        self._ends_by.clear()
        self.outgoing.tell_target(AbortAll())

    def on_front(self, msg: FrontToTok) -> None:
        """A message from the front."""
        match msg:
            case Submit():
                self._on_submit(msg)
            case Abort(rid):
                self._on_abort(rid)
            case AbortAll():
                self.start()

    def on_encoded(self, rid: ReqId, result: "array[int] | Exception") -> None:
        """A long prompt is encoded, or could not be. Its request may be gone by now."""
        submit = self._encoding.pop(rid, None)
        if submit is None:
            return
        try:
            if isinstance(result, Exception):
                raise result
            self._admit(submit, result)
        except Exception as error:
            self._refuse(rid, error)

    def on_target(self, msg: TargetToTok) -> None:
        """A message from the target. Raises ValueError on one whose columns don't fit together."""
        match msg:
            case TokensOut():
                self._on_tokens(msg)
            case Failed(rid, kind, message):
                self._on_failed(rid, kind, message)

    def on_time(self, now: float) -> None:
        """End the requests that the target was asked to end long ago: it has lost them."""
        while self._ends_by:
            # The oldest is the first one: all got the same time.
            rid, ends_by = next(iter(self._ends_by.items()))
            if ends_by > now:
                return
            logger.warning("no answer to abort rid=%d after=%.0fs", rid, self._config.abort_timeout_s)
            self._end(self._reqs[rid], FinishReason.ABORT, None)

    def _on_submit(self, submit: Submit) -> None:
        if submit.rid in self._encoding or submit.rid in self._reqs:
            # Two answers for one rid would break the promise to the first.
            logger.error("submit of a known request ignored rid=%d", submit.rid)
            return
        try:
            self._encoder.check_request(submit)
            if isinstance(submit.prompt, TokenPrompt):
                self._admit(submit, self._encoder.check_tokens(submit.prompt.token_ids))
                return
            text = self._encoder.text_of(submit.prompt)
            if len(text.text) <= self._config.inline_chars:
                self._admit(submit, self._encoder.encode(text))
                return
            self._encode_later(submit.rid, text)
            self._encoding[submit.rid] = submit
        except Exception as error:
            self._refuse(submit.rid, error)

    def _refuse(self, rid: ReqId, error: Exception) -> None:
        """One request's error must not end the others."""
        if isinstance(error, ValueError):
            self.outgoing.fail(rid, "bad_request", str(error))
        else:
            logger.error("encode failed rid=%d error=%s", rid, trace(error))
            self.outgoing.fail(rid, "internal", f"the prompt could not be encoded: {error}")

    def _admit(self, submit: Submit, prompt_ids: "array[int]") -> None:
        admit = self._encoder.admit(submit, prompt_ids)
        stream = self._encoder.stream_for(submit, prompt_ids)
        # The first life gave out the text of these tokens up to what it held back, and so does this one.
        stream.feed(unpack_tokens(submit.resumed))
        req = _Req(submit.rid, admit.prompt_len, stream, submit.include_stop)
        self.outgoing.accept(req.rid, req.prompt_len)
        self._reqs[req.rid] = req
        if stream.matched:
            self._end(req, FinishReason.STOP, None)
        elif stream.num_tokens >= admit.sampling.max_tokens:
            self._end(req, FinishReason.LENGTH, None)
        else:
            self.outgoing.tell_target(admit)

    def _on_abort(self, rid: ReqId) -> None:
        if rid in self._encoding:
            del self._encoding[rid]
            self.outgoing.finish(rid, FinishReason.ABORT, Usage(0, 0, 0))
        elif rid in self._reqs:
            self._ask_to_end(rid)

    def _ask_to_end(self, rid: ReqId) -> None:
        if rid not in self._ends_by:
            self._ends_by[rid] = time.monotonic() + self._config.abort_timeout_s
            self.outgoing.tell_target(Abort(rid))

    def _on_tokens(self, msg: TokensOut) -> None:
        _check_columns(msg)
        usages = iter(msg.usages)
        for rid, packed, finish in zip(msg.rids, msg.token_ids, msg.finished, strict=True):
            usage = next(usages) if finish else None
            req = self._reqs.get(rid)
            if req is not None:
                self._advance(req, unpack_tokens(packed), usage)
                if usage is not None:
                    self._end(req, finish, usage)
            elif usage is None:
                # Of an older life of this process: nobody reads it, so the target need not go on.
                self.outgoing.tell_target(Abort(rid))

    def _advance(self, req: _Req, token_ids: list[int], usage: Usage | None) -> None:
        """Pass on what these tokens decide. usage is there if they are the last ones."""
        stream = req.stream
        before = stream.num_tokens
        if usage is not None and token_ids[-1:] == [usage.matched_stop] and not req.includes_stop:
            # The token that ended the answer is part of it, its text is not.
            text = stream.feed(token_ids[:-1])
            if not stream.matched:
                stream.take_silently(token_ids[-1:])
        else:
            text = stream.feed(token_ids)
        num_taken = stream.num_tokens - before
        if num_taken:
            self.outgoing.add(req.rid, text, array("i", token_ids[:num_taken]).tobytes())
        if stream.matched and usage is None:
            self._ask_to_end(req.rid)

    def _end(self, req: _Req, finish: FinishReason, usage: Usage | None) -> None:
        """The terminal message. usage None: the target has none, so it is what was counted here."""
        stream = req.stream
        if usage is None:
            usage = Usage(req.prompt_len, stream.num_tokens, 0)
        if not stream.matched and (rest := stream.flush()):
            self.outgoing.add(req.rid, rest, b"")
        if stream.matched:
            finish = FinishReason.STOP
            usage = msgspec.structs.replace(usage, completion_tokens=stream.num_tokens, matched_stop=-1)
        del self._reqs[req.rid]
        self._ends_by.pop(req.rid, None)
        self.outgoing.finish(req.rid, finish, usage, stream.matched)

    def _on_failed(self, rid: ReqId, kind: str, message: str) -> None:
        req = self._reqs.get(rid)
        if req is None:
            return
        if req.stream.matched:
            # Its text was complete before anything went wrong.
            self._end(req, FinishReason.STOP, None)
            return
        del self._reqs[rid]
        self._ends_by.pop(rid, None)
        self.outgoing.fail(rid, kind, message)


def _check_columns(msg: TokensOut) -> None:
    num_finished = sum(1 for finish in msg.finished if finish)
    columns = [len(msg.rids), len(msg.token_ids), len(msg.finished), len(msg.usages)]
    if columns != [columns[0], columns[0], columns[0], num_finished]:
        raise ValueError(f"TokensOut has columns of {columns} entries with {num_finished} finished")
    if any(len(packed) % 4 for packed in msg.token_ids):
        raise ValueError("TokensOut has token ids that are not 4 bytes each")
