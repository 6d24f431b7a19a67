"""The waiting list: who is opened next."""

import heapq
from collections.abc import Iterator

from memsvc.wire.base import ReqId
from target_worker.req import Phase, Req


class WaitingList:
    """Requests in the order they should be opened: higher priority first, then by arrival.

    A retracted request keeps its arrival, so it comes before everyone who arrived after it.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Req]] = []
        self._reqs: dict[ReqId, Req] = {}

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs.values())

    def holds(self, rid: ReqId) -> bool:
        """rid waits here."""
        return rid in self._reqs

    def push(self, req: Req) -> None:
        """Add a request that holds no memory."""
        req.phase = Phase.WAITING
        self._reqs[req.rid] = req
        heapq.heappush(self._heap, (-req.priority, req.arrival, req))

    def remove(self, rid: ReqId) -> Req | None:
        """Take rid out, or return None if it does not wait. Its heap entry goes when it surfaces."""
        return self._reqs.pop(rid, None)

    def first(self, num: int, max_tokens: int) -> list[Req]:
        """Take out the next num requests, at least one of them and then max_tokens at most in all.

        Those that cannot be opened come back by push.
        """
        taken: list[Req] = []
        num_tokens = 0
        while self._heap and len(taken) < num:
            entry = heapq.heappop(self._heap)
            req = entry[2]
            if self._reqs.get(req.rid) is not req:
                continue
            num_tokens += len(req.tokens)
            if taken and num_tokens > max_tokens:
                heapq.heappush(self._heap, entry)
                break
            del self._reqs[req.rid]
            taken.append(req)
        return taken
