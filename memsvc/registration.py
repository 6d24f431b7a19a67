"""What both clients share: the numbering of one registration, and what a reply means. No I/O."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from memsvc.errors import FencedError, MemoryServiceError
from memsvc.wire.base import WIRE_VERSION, BadRequest, Epoch, Msg
from memsvc.wire.mem import (
    Close,
    Commit,
    Fenced,
    Freeze,
    OpenReq,
    Register,
    Registered,
    Reserve,
    ResetDraft,
    Step,
    Stepped,
)

ReplyT = TypeVar("ReplyT", bound=Msg)


def expect(reply: Any, reply_type: type[ReplyT]) -> ReplyT:
    """reply, if it has that type; raises MemoryServiceError or FencedError for what it says instead."""
    if isinstance(reply, reply_type):
        return reply
    if isinstance(reply, BadRequest):
        raise MemoryServiceError(reply.reason)
    if isinstance(reply, Fenced):
        raise FencedError(f"epoch {reply.epoch} is over")
    raise MemoryServiceError(f"expected {reply_type.__name__}, the service answered {type(reply).__name__}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """The parts of a Step that the caller decides; None or empty = nothing."""

    done_step: int = 0
    """Number of the newest Step whose grants no running kernel can still use."""
    commit: Commit | None = None
    """Lengths whose KV is final now."""
    reset_draft: ResetDraft | None = None
    """Requests whose draft KV is lost."""
    closes: Sequence[Close] = ()
    """Requests that end."""
    reserve: Reserve | None = None
    """Slots for the tokens of coming forwards."""
    opens: Sequence[OpenReq] = ()
    """Requests that begin."""
    freeze: Freeze | None = None
    """States to be kept in the tree."""


class Registration:
    """One client's place with the service: its epoch, and the number of its next Step."""

    def __init__(self) -> None:
        self.registered: Registered | None = None
        self.last_num = 0
        """Number of the newest Step that the service has carried out."""

    @property
    def epoch(self) -> Epoch:
        """Raises ValueError before the first registration and after leaving."""
        if self.registered is None:
            raise ValueError("not registered with the memory service")
        return self.registered.epoch

    def make_register(self, engine: str, role: str, kinds: Sequence[str], model_fingerprint: str) -> Register:
        """The message that joins as (engine, role) for this process."""
        return Register(WIRE_VERSION, engine, role, list(kinds), model_fingerprint, os.getpid())

    def began(self, reply: Any) -> Registered:
        """Take the answer to Register: a new epoch, numbered from 1."""
        self.registered = expect(reply, Registered)
        self.last_num = 0
        return self.registered

    def make_step(self, parts: StepParts) -> Step:
        """The next Step. A refused Step changes nothing and uses no number, so this may give it out again."""
        return Step(
            epoch=self.epoch,
            num=self.last_num + 1,
            done_step=parts.done_step,
            commit=parts.commit,
            reset_draft=parts.reset_draft,
            closes=list(parts.closes),
            reserve=parts.reserve,
            opens=list(parts.opens),
            freeze=parts.freeze,
        )

    def stepped(self, reply: Any) -> Stepped:
        """Take the answer to the last Step."""
        result = self.expect(reply, Stepped)
        assert result.num == self.last_num + 1, f"Step {self.last_num + 1} answered as {result.num}"
        self.last_num = result.num
        return result

    def expect(self, reply: Any, reply_type: type[ReplyT]) -> ReplyT:
        """Like the function of that name; being fenced also ends the registration."""
        try:
            return expect(reply, reply_type)
        except FencedError:
            self.left()
            raise

    def left(self) -> None:
        """The epoch is over, or its numbering is lost; register before anything else."""
        self.registered = None
