"""The state pool of the split modes: running requests take what they need, checkpoints live in the rest."""

from bisect import bisect_right, insort
from collections import OrderedDict
from hashlib import blake2b


class StateSlots:
    """Checkpoints keyed by the prefix they sum up, evicted least recently used.

    A request copies the checkpoint it goes on from, so that no checkpoint is ever locked. Running
    requests and checkpoints share the pool byte by byte, without slots of one size.
    """

    def __init__(self, pool_bytes: int, run_bytes: int, state_bytes: int) -> None:
        self._pool_bytes = pool_bytes
        self._run_bytes = run_bytes
        self._state_bytes = state_bytes
        self.num_running = 0
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()
        self._lens: list[int] = []
        """Lengths of all checkpoints, ascending."""

    @property
    def num_checkpoints(self) -> int:
        """States that nobody runs with."""
        return len(self._checkpoints)

    @property
    def free_bytes(self) -> int:
        """Neither running nor a checkpoint."""
        return self._pool_bytes - self.running_bytes - self.num_checkpoints * self._state_bytes

    @property
    def running_bytes(self) -> int:
        """Held by running requests, scratch and rings among it."""
        return self.num_running * self._run_bytes

    @property
    def num_admissible(self) -> int:
        """How many more requests could run if every checkpoint were evicted."""
        return self._pool_bytes // self._run_bytes - self.num_running

    def admit(self) -> None:
        """One more request runs, at the cost of checkpoints if need be."""
        assert self.num_admissible > 0, f"{self.num_running} run in {self._pool_bytes} bytes"
        self.num_running += 1
        while self.free_bytes < 0:
            self._evict()

    def release(self) -> None:
        """A request has ended."""
        self.num_running -= 1

    def find(self, text: bytes, max_len: int) -> int:
        """The length of the longest checkpoint of a prefix of text, at most max_len tokens; 0 if there is none."""
        digest, done, found = blake2b(), 0, b""
        for length in dict.fromkeys(self._lens[: bisect_right(self._lens, max_len)]):
            digest.update(text[4 * done : 4 * length])
            done = length
            if (key := digest.digest()) in self._checkpoints:
                found = key
        if not found:
            return 0
        self._checkpoints.move_to_end(found)
        return self._checkpoints[found]

    def store(self, text: bytes, length: int) -> bool:
        """Keep the state after `length` tokens of text, in place of the oldest; False if running requests take all."""
        key = blake2b(text[: 4 * length]).digest()
        if key in self._checkpoints:
            self._checkpoints.move_to_end(key)
            return True
        while self.free_bytes < self._state_bytes and self._checkpoints:
            self._evict()
        if self.free_bytes < self._state_bytes:
            return False
        self._checkpoints[key] = length
        insort(self._lens, length)
        return True

    def _evict(self) -> None:
        _, length = self._checkpoints.popitem(last=False)
        del self._lens[bisect_right(self._lens, length) - 1]
