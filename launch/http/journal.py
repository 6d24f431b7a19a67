"""What the front must remember of each request to send it again after another process was restarted."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from launch.http.calls import Call, Choice
from launch.http.generation import Prompt
from memsvc.wire.base import ReqId
from memsvc.wire.text import Sampling, Submit

_BITS_PER_GENERATION = 40

MAX_DEATHS = 2
"""Deaths of one kind of process, without a new token of the request in between, after which it is not sent again.

One fewer than the supervisor allows in a minute (launch/policy.py), so a request that kills a process fails alone
and does not end the server. New tokens set the count back: a request that moves on is not what it dies of. That a
tokenizer has encoded the prompt does not: it may die of the first token.
"""


@dataclass(slots=True)
class Deaths:
    """Deaths of one kind of process while a request was in flight."""

    num: int = 0
    num_bytes: int = 0
    """Length of the request's tokens at the last one."""

    def count(self, num_bytes: int) -> bool:
        """One more, with so many bytes of tokens; True once there were MAX_DEATHS without a token between them."""
        self.num = self.num + 1 if num_bytes == self.num_bytes else 1
        self.num_bytes = num_bytes
        return self.num >= MAX_DEATHS


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One request in flight and where its output goes. tokens: packed, all that were received so far."""

    rid: ReqId
    call: Call
    choice: Choice
    prompt: Prompt
    sampling: Sampling
    tokens: bytearray = field(default_factory=bytearray)
    num_prompt_bytes: int = 0
    is_sent: bool = False
    """Whether a process that dies can have had it."""
    deaths: dict[str, Deaths] = field(default_factory=dict)
    """By what died: "model" or "tokenizer"."""

    def is_suspect_after_death(self, of: str) -> bool:
        """Count a death; True once this request may well be what they die of, see MAX_DEATHS."""
        return self.is_sent and self.deaths.setdefault(of, Deaths()).count(len(self.tokens))

    def submit(self) -> Submit:
        """The message that starts the request, or takes it up where it stopped."""
        generation = self.call.generation
        return Submit(
            rid=self.rid,
            prompt=self.prompt,
            sampling=self.sampling,
            stop=generation.stop,
            include_stop=generation.include_stop,
            priority=generation.priority,
            salt=generation.salt,
            resumed=bytes(self.tokens),
        )


class Journal:
    """Requests in flight by id, in the order of their arrival."""

    def __init__(self, generation: int) -> None:
        self._next = (generation << _BITS_PER_GENERATION) + 1
        self._entries: dict[ReqId, Entry] = {}
        self.num_bytes = 0
        """Prompts and tokens held."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def new_rid(self) -> ReqId:
        """An id that no request of this run had before, whichever front sent it."""
        rid = ReqId(self._next)
        self._next += 1
        return rid

    def add(self, entry: Entry) -> None:
        """Remember a request."""
        self._entries[entry.rid] = entry
        self.num_bytes += entry.num_prompt_bytes + len(entry.tokens)

    def get(self, rid: ReqId) -> Entry | None:
        """The request of that id, if it is in flight."""
        return self._entries.get(rid)

    def extend(self, entry: Entry, tokens: bytes) -> None:
        """The request has got more tokens (packed)."""
        entry.tokens += tokens
        self.num_bytes += len(tokens)

    def remove(self, entry: Entry) -> None:
        """Forget a request that ended. Nothing happens if it was forgotten already."""
        if self._entries.pop(entry.rid, None) is not None:
            self.num_bytes -= entry.num_prompt_bytes + len(entry.tokens)

    def of_call(self, call: Call) -> list[Entry]:
        """The requests of one call that are in flight."""
        return [entry for entry in self._entries.values() if entry.call is call]

    def renumber(self) -> list[Entry]:
        """Give every request a new id, so that what still arrives for the old one is not taken twice."""
        entries = list(self._entries.values())
        for entry in entries:
            entry.rid = self.new_rid()
        self._entries = {entry.rid: entry for entry in entries}
        return entries
