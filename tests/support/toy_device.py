"""A device of two streams that does what is enqueued as late as anybody may, or at random as early as it may.

What lies in its memory is tokens: the toy model's KV and features of a token are the token itself.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from memsvc.wire.base import PageId
from tests.support.toy_watch import PoolWatch

Op = Callable[[], bool]
"""Does its work and says True, or False while it has to wait."""
TARGET, DRAFT = "target", "draft"
CLOSED, STOPPED, RUNNING = 3, 1, 0


@dataclass(slots=True)
class ToySlot:
    """The state of a slot, and the text that its request really has."""

    tokens: list[int] = field(default_factory=list)
    """Prompt and answer so far, the anchor last."""
    n_out: int = 0
    max_tokens: int = 0
    done: int = CLOSED
    valid_from: int = 0
    num_rows: int = 0
    feature_start: int = 0
    feature_row: int = 0
    num_drafts: int = 0
    drafts: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """accepted[j] = verifies of the request that accepted j drafts, of those that had any."""

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """A verify had so many drafts that could be of use."""
        if num_drafts > 0:
            self.accepted.extend([0] * (num_accepted + 1 - len(self.accepted)))
            self.accepted[num_accepted] += 1

    @property
    def length(self) -> int:
        """Position of the anchor."""
        return len(self.tokens) - 1

    @property
    def end_len(self) -> int:
        """No token at or past this matters."""
        return len(self.tokens) - self.n_out + self.max_tokens


class ToyDevice:
    """Streams, hand-over words, slots, exchange and the pages of both kinds."""

    def __init__(self, num_slots: int, num_rows: int, watch: PoolWatch, rng: random.Random | None) -> None:
        """num_rows: of the exchange. rng: runs things early by chance; None runs everything late."""
        self.watch = watch
        self.slots = [ToySlot() for _ in range(num_slots + 1)]
        self.exchange = [-1] * num_rows
        self.kv: dict[str, dict[tuple[int, int], int]] = {"target_kv": {}, "draft_kv": {}}
        self.table = np.zeros((num_slots + 1, 1), dtype=np.int32)
        """The target's, as its kernels see it."""
        self.words = {TARGET: 0, DRAFT: 0}
        """What each stream has written: F and D."""
        self.on_look: Callable[[], None] = lambda: None
        """Called whenever the host looks how far things are."""
        self._queues: dict[str, deque[Op]] = {TARGET: deque(), DRAFT: deque()}
        self._rng = rng

    def put(self, stream: str, op: Callable[[], object]) -> None:
        """Enqueue work that waits for nobody."""

        def run() -> bool:
            op()
            return True

        self._queues[stream].append(run)
        self._hurry()

    def put_wait(self, stream: str, peer: str, value: int) -> None:
        """What comes after this waits until peer has written value or more."""
        self._queues[stream].append(lambda: self.words[peer] >= value)
        self._hurry()

    def put_word(self, stream: str, value: int) -> None:
        """Write the stream's word."""

        def write() -> None:
            assert value > self.words[stream], f"{stream} writes {value} after {self.words[stream]}"
            self.words[stream] = value

        self.put(stream, write)

    def _hurry(self) -> None:
        if self._rng is not None:
            for _ in range(self._rng.randrange(6)):
                self._step(self._rng.choice((TARGET, DRAFT)))

    def _step(self, stream: str) -> bool:
        queue = self._queues[stream]
        if not queue or not queue[0]():
            return False
        queue.popleft()
        return True

    def run_until(self, is_over: Callable[[], bool]) -> bool:
        """Do as little as there must be done for is_over to be true. False if that does not come."""
        self.on_look()
        while not is_over():
            if not self._step(TARGET) and not self._step(DRAFT):
                return False
        return True

    def is_empty(self, stream: str) -> bool:
        """Nothing is enqueued there."""
        return not self._queues[stream]

    def drain(self, stream: str) -> None:
        """Do all that is enqueued there."""
        assert self.run_until(lambda: self.is_empty(stream)), f"{stream} waits for nobody: {self.words}"

    def tear_down(self, stream: str) -> None:
        """Its process is gone."""
        self._queues[stream].clear()

    # What work does

    def clear(self, name: str, pages: Sequence[PageId]) -> None:
        """Zero pages."""
        self.watch.clear(name, list(pages))
        gone = set(pages)
        self.kv[name] = {place: token for place, token in self.kv[name].items() if place[0] not in gone}

    def write(self, name: str, page: int, offset: int, token: int) -> None:
        """Keys and values of a token. Page 0 is the dummy."""
        if page:
            self.watch.write(name, page)
            self.kv[name][page, offset] = token

    def read(self, name: str, page: int, offset: int) -> int:
        """The token there, -1 if there is none."""
        return self.kv[name].get((page, offset), -1)


class ToyLane:
    """The target's Lane."""

    def __init__(self, device: ToyDevice) -> None:
        self._device = device
        self.has_peer: Callable[[], bool] = lambda: False
        """The draft's process lives."""

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def await_peer(self, value: int) -> None:
        self._device.put_wait(TARGET, DRAFT, value)

    def post(self, value: int) -> None:
        self._device.put_word(TARGET, value)

    def hand_over_without_peer(self, value: int, _voided: object) -> None:
        assert self._device.is_empty(DRAFT), "the draft is still at work on what the target would go on with"
        for slot in self._device.slots:
            slot.num_drafts = 0
        self._device.words[DRAFT] = value
