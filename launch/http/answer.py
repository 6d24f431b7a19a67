"""How the output of a call becomes JSON: chat and completion bodies, whole or in chunks."""

import time
import uuid
from typing import Literal

from msgspec import UNSET, UnsetType

from launch.http.calls import Call, Choice
from launch.http.responses import (
    AnswerBody,
    AnswerMessage,
    ChoiceBody,
    Delta,
    UsageBody,
    speculative_metrics,
    usage_body,
)
from memsvc.wire.base import FinishReason

Kind = Literal["chat", "completion"]
_ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}
_OBJECT = {"chat": "chat.completion", "completion": "text_completion"}
_CHUNK_OBJECT = {"chat": "chat.completion.chunk", "completion": "text_completion"}


class AnswerWriter:
    """Writes the bodies of one call. num_spec_tokens: k of this server, told with the acceptance facts."""

    def __init__(self, kind: Kind, call: Call, num_spec_tokens: int) -> None:
        self._kind: Kind = kind
        self._call = call
        self._num_spec_tokens = num_spec_tokens
        self._id = _ID_PREFIX[kind] + uuid.uuid4().hex
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._told_end: set[int] = set()

    def whole(self) -> AnswerBody:
        """The full answer of a complete call."""
        choices: list[ChoiceBody] = []
        for choice in self._call.choices:
            text = choice.take_text()
            message = AnswerMessage(text) if self._kind == "chat" else UNSET
            choices.append(self._choice(choice, message=message, text=UNSET if self._kind == "chat" else text))
        return self._body(_OBJECT[self._kind], choices, usage=self._final_usage(), with_metrics=True)

    def chunks(self) -> list[AnswerBody]:
        """Chunks for what came since the last call, at most two a choice."""
        chunks: list[AnswerBody] = []
        for choice in self._call.choices:
            if choice.index in self._told_end or not choice.has_news:
                continue
            if self._kind == "chat" and choice.index not in self._begun:
                self._begun.add(choice.index)
                first = ChoiceBody(index=choice.index, delta=Delta(role="assistant", content=""))
                chunks.append(self._chunk(first))
            chunks.append(self._chunk(self._news_of(choice)))
        return chunks

    def usage_chunk(self) -> AnswerBody:
        """The last chunk of a stream that was asked for usage."""
        return self._body(_CHUNK_OBJECT[self._kind], [], usage=self._final_usage(), with_metrics=True)

    def _news_of(self, choice: Choice) -> ChoiceBody:
        text = choice.take_text()
        if choice.finish is not FinishReason.RUNNING:
            self._told_end.add(choice.index)
        if self._kind == "completion":
            return self._choice(choice, text=text)
        return self._choice(choice, delta=Delta(content=text) if text else Delta())

    def _choice(
        self,
        choice: Choice,
        message: AnswerMessage | UnsetType = UNSET,
        delta: Delta | UnsetType = UNSET,
        text: str | UnsetType = UNSET,
    ) -> ChoiceBody:
        return ChoiceBody(
            index=choice.index,
            message=message,
            delta=delta,
            text=text,
            finish_reason=choice.finish.value or None,
            stop_reason=choice.stop_reason(self._call.generation.sampling.stop_token_ids),
            matched_stop=choice.matched_stop(),
        )

    def _chunk(self, choice: ChoiceBody) -> AnswerBody:
        generation = self._call.generation
        usage: UsageBody | UnsetType | None = UNSET
        if generation.continuous_usage:
            done = sum(choice.num_tokens for choice in self._call.choices)
            prompt = self._call.prompt_tokens
            usage = UsageBody(prompt, done, prompt + done)
        elif generation.include_usage:
            usage = None
        return self._body(_CHUNK_OBJECT[self._kind], [choice], usage=usage)

    def _body(
        self,
        kind: str,
        choices: list[ChoiceBody],
        usage: UsageBody | UnsetType | None,
        with_metrics: bool = False,
    ) -> AnswerBody:
        return AnswerBody(
            id=self._id,
            object=kind,
            created=self._created,
            model=self._call.generation.model,
            choices=choices,
            usage=usage,
            metrics=speculative_metrics(self._call.usages, self._num_spec_tokens) if with_metrics else UNSET,
        )

    def _final_usage(self) -> UsageBody:
        return usage_body(self._call.prompt_tokens, self._call.usages)
