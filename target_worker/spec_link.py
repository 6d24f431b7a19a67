"""Talks to the draft worker: one Propose per step for the whole batch, and what happens when it is gone."""

from collections.abc import Iterable

from memsvc.rpc import Rpc
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.links import MAX_MSG_BYTES
from memsvc.wire.spec import Drafted, DraftReady, Propose
from target_worker.draft_peer import DraftContract, DraftPeer, named
from target_worker.propose import book, make_propose, open_bytes, split
from target_worker.req import Req

MAX_OPEN_BYTES = MAX_MSG_BYTES // 4
"""Most that requests told of at once may take in a message: the rest of it, and other codings, need room too."""


class SpecLink(DraftPeer):
    """The draft as the target sees it: up or down, and what it has been told of each request.

    Nothing here raises when the draft dies: propose returns no drafts.
    """

    def __init__(self, rpc: Rpc, contract: DraftContract, max_open_bytes: int = MAX_OPEN_BYTES) -> None:
        """max_open_bytes: requests to tell of that take more go out in several messages."""
        super().__init__(rpc, contract)
        self._max_open_bytes = max_open_bytes
        self._closes: list[ReqId] = []
        self.last: Drafted | None = None
        """Reply of the newest Propose, for its times."""

    def _takes(self, ready: DraftReady) -> bool:
        return not ready.plans

    def _forget(self) -> None:
        self._closes = []

    def close(self, req: Req) -> None:
        """The draft forgets req with the next Propose. Call it for every request that was told of."""
        # A draft that is down has forgotten everybody by itself.
        if req.draft.is_open and self._ready is not None:
            self._closes.append(req.rid)
        req.draft.is_open = False
        req.draft.pending.clear()

    def propose(
        self, blocks: list[Req], known: Iterable[Req], clear: list[PageId], num_drafts: int
    ) -> dict[ReqId, list[int]]:
        """Write pending features of `known` (all open requests) and draft for `blocks`; {} if that failed."""
        known = list(known)
        if self._ready is None or not (blocks or self._closes or any(req.draft.pending for req in known)):
            return {}
        if not self._open_ahead(known, clear):
            return {}
        msg = make_propose(self._closes, blocks, known, clear, num_drafts)
        reply = self._ask(msg, known, clear)
        if reply is None:
            return {}
        self.last = reply
        return split(reply, msg)

    def _open_ahead(self, known: list[Req], clear: list[PageId]) -> bool:
        """Tell of as many requests that one more message has room for the rest of them. False if the draft was lost.

        A draft that comes up is told of every request at once, with all tokens of each.
        """
        waiting = [req for req in known if not req.draft.is_open]
        while sum(map(open_bytes, waiting)) > self._max_open_bytes and len(waiting) > 1:
            num_bytes, part = 0, []
            while len(waiting) > 1 and (not part or num_bytes + open_bytes(waiting[0]) <= self._max_open_bytes):
                num_bytes += open_bytes(waiting[0])
                part.append(waiting.pop(0))
            # Features of part are written with it, so what must be zeroed before goes with the first message.
            if self._ask(make_propose(self._closes, [], part, clear, 0), part, clear) is None:
                return False
        return True

    def _ask(self, msg: Propose, known: list[Req], clear: list[PageId]) -> Drafted | None:
        """The reply to a message made of known and clear, or None if the draft is lost with it."""
        self._rpc.send(msg)
        reply = self._wait()
        if not isinstance(reply, Drafted):
            self._lost(f"reply={named(reply)}")
            return None
        self._closes = []
        clear.clear()
        book(msg, known)
        return reply
