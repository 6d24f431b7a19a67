"""What one turn of the loop has to say, in the order in which the receivers may see it."""

from dataclasses import dataclass

from memsvc.wire.base import FinishReason, ReqId
from memsvc.wire.text import Accepted, Failed, TextOut, TokToFront, TokToTarget, Usage


@dataclass(slots=True)
class _Row:
    """Text of one request; finish stays RUNNING until its terminal row is added."""

    text: str = ""
    token_ids: bytes = b""
    finish: FinishReason = FinishReason.RUNNING
    usage: Usage | None = None
    stop: str = ""


class Outgoing:
    """Collects messages; rows of all requests leave as one TextOut."""

    def __init__(self) -> None:
        self._to_front: list[TokToFront] = []
        self._to_target: list[TokToTarget] = []
        self._rows: dict[ReqId, _Row] = {}

    def accept(self, rid: ReqId, prompt_len: int) -> None:
        """The first message about a request that goes to the target."""
        self._to_front.append(Accepted(rid, prompt_len))

    def fail(self, rid: ReqId, kind: str, message: str) -> None:
        """The last message about a request; text of it that is here already goes before."""
        if rid in self._rows:
            self._close_rows()
        self._to_front.append(Failed(rid, kind, message))

    def add(self, rid: ReqId, text: str, token_ids: bytes) -> None:
        """More text and tokens of a request."""
        row = self._rows.setdefault(rid, _Row())
        row.text += text
        row.token_ids += token_ids

    def finish(self, rid: ReqId, finish: FinishReason, usage: Usage, stop: str = "") -> None:
        """Nothing comes after this for rid."""
        row = self._rows.setdefault(rid, _Row())
        row.finish, row.usage, row.stop = finish, usage, stop

    def tell_target(self, msg: TokToTarget) -> None:
        """A message for the target."""
        self._to_target.append(msg)

    def take(self) -> tuple[list[TokToFront], list[TokToTarget]]:
        """All messages since the last call, for the front and for the target."""
        self._close_rows()
        taken = self._to_front, self._to_target
        self._to_front, self._to_target = [], []
        return taken

    def _close_rows(self) -> None:
        if not self._rows:
            return
        rows, self._rows = self._rows, {}
        finished = [row for row in rows.values() if row.finish]
        self._to_front.append(
            TextOut(
                rids=list(rows),
                texts=[row.text for row in rows.values()],
                token_ids=[row.token_ids for row in rows.values()],
                finished=[row.finish for row in rows.values()],
                usages=[row.usage for row in finished if row.usage is not None],
                stops=[row.stop for row in finished],
            )
        )
