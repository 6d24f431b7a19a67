"""Checkpoints: states of running requests become part of the tree, and too many on one path are thinned out."""

from typing import Final

from memsvc.core.ledger import Ledger, add
from memsvc.core.outcome import Outcome
from memsvc.core.radix import Checkpoint, Node, checkpoints_up
from memsvc.core.reqs import Req
from memsvc.core.sessions import Client
from memsvc.core.store import PageStore
from memsvc.wire.mem import Freeze

MAX_NEAR: Final = 2
"""Checkpoints kept within one interval of the newest on a path; farther away one for each doubling."""


class Checkpoints:
    """A frozen state is written by nobody; its request reads it on until it has written its own.

    So the request holds at most one version: the one it was opened with, or the one it froze last. It
    lets go of it when its next page is full, which takes a step more to come true for what is in flight.
    """

    def __init__(self, store: PageStore, ledger: Ledger) -> None:
        self._store = store
        self._kinds = store.kinds
        self._ledger = ledger
        self.num_frozen = 0
        self.num_skipped = 0
        self.num_thinned = 0

    def freeze(self, client: Client, part: Freeze, closing: set[int], out: Outcome) -> None:
        """Make checkpoints of part's states; requests in `closing` (rids) need no pages in exchange."""
        for rid, length in zip(part.rids, part.lens, strict=True):
            req, at = client.engine.reqs[rid], length // self._kinds.page_size
            node = _node_at(req.node, at)
            known = node.checkpoints.get(at)
            if known is not None:
                self._refresh(known)
            elif rid in closing:
                self._store_state(client, req, node, at)
            elif not self._exchange(client, req, (node, at), out):
                self.num_skipped += 1

    def _refresh(self, checkpoint: Checkpoint) -> None:
        """Another request stands where this state does: as good as a hit."""
        checkpoint.last_access = self._store.now
        if checkpoint.entry:
            self._store.queue.push_checkpoint(checkpoint)

    def _exchange(self, client: Client, req: Req, place: tuple[Node, int], out: Outcome) -> bool:
        """Store the state and give the request other pages to write; False, and nothing done, without room."""
        needs = [0] * self._kinds.num_kinds
        for kind in self._kinds.states:
            needs[kind] = len(req.tables[kind])
        ahead = add(needs, self._ledger.promised())
        if (
            self._ledger.opens_paused
            or not self._store.fits(ahead)
            or self._ledger.over_quota_by([(req, needs)], set())
        ):
            return False
        self._store_state(client, req, *place)
        for kind in self._kinds.states:
            pages = self._store.take(kind, needs[kind], ahead)
            for index, page in enumerate(pages):
                self._store.pool.owner[kind][page] = req.uid
                out.remap.add(req, kind, index, page)
            req.tables[kind] = pages
        return True

    def _store_state(self, client: Client, req: Req, node: Node, at: int) -> None:
        """The request's state pages become a checkpoint under its lock, in place of the one it held."""
        store, pages = self._store, []
        for kind in self._kinds.states:
            table, req.tables[kind] = req.tables[kind], []
            store.pool.publish(kind, table)
            store.pool.hold(kind, table)
            pages.append(table)
        checkpoint = node.checkpoints[at] = Checkpoint(node, at, pages, store.now)
        store.num_checkpoints += 1
        self.num_frozen += 1
        before, req.state_in = req.state_in, checkpoint
        if before is not None:
            client.leaving.append((client.last_num, req, before))
        self._thin(node, at)

    def _thin(self, node: Node, newest: int) -> None:
        """Of those on the path that nobody holds: keep forks, two near ones, and one for each doubling of distance."""
        interval, held_distance, num_near = self._kinds.checkpoint_pages, 0, 0
        drop: list[Checkpoint] = []
        last: Checkpoint | None = None
        for checkpoint in checkpoints_up(node, newest - 1):
            if _is_fork(checkpoint):
                continue
            distance = ((newest - checkpoint.at) // interval).bit_length()
            if not distance:
                num_near += 1
                if num_near > MAX_NEAR:
                    drop.append(checkpoint)
                continue
            if last is not None and distance == held_distance:
                drop.append(last)  # of two at about the same distance the farther: it is the next doubling's soon
            held_distance, last = distance, checkpoint
        for checkpoint in drop:
            if not self._store.is_held(checkpoint):
                self._store.drop_checkpoint(checkpoint)
                self.num_thinned += 1

    def pass_on(self, client: Client, req: Req) -> None:
        """The request has filled a page past the state it reads: it lets go of it once its present step is done."""
        held = req.state_in
        if held is None or req.target_len < (held.at + 1) * self._kinds.page_size:
            return
        req.state_in = None
        client.leaving.append((client.last_num, req, held))


def _node_at(node: Node, at: int) -> Node:
    """The node of the path whose pages end at or after page `at`, or just before it in the next."""
    while node.start >= at:
        assert node.parent is not None, f"page {at} is above the root"
        node = node.parent
    return node


def _is_fork(checkpoint: Checkpoint) -> bool:
    """Paths part where it stands: it serves more than the newest text."""
    node = checkpoint.node
    return checkpoint.at == node.end and len(node.children) > 1
