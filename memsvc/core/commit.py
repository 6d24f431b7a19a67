"""Committer: takes over the new lengths of a step, and publishes what they fill."""

from memsvc.core.checkpoints import Checkpoints
from memsvc.core.outcome import Columns
from memsvc.core.publish import Publisher
from memsvc.core.reqs import Req
from memsvc.core.sessions import Client
from memsvc.core.store import PageStore
from memsvc.core.validate import CommitRow


class Committer:
    """In most steps a request fills at most one page, at the end of a node that is its own.

    All such requests are handled together; the Publisher knows every other case.
    """

    def __init__(self, store: PageStore, publisher: Publisher, checkpoints: Checkpoints) -> None:
        self._store = store
        self._kinds = store.kinds
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._has_window = any(store.kinds.windows)

    def commit(self, client: Client, rows: list[CommitRow], remap: Columns) -> None:
        """Set the lengths of every row."""
        plain: list[Req] = []
        others: list[Req] = []
        for req, target_len, draft_len, tokens in rows:
            req.tokens += tokens
            req.target_len, req.draft_len = target_len, draft_len
            if target_len >= req.next_full or draft_len >= req.next_aux_full:
                (plain if self._is_plain(req) else others).append(req)
            elif req.state_in is not None:
                self._checkpoints.pass_on(client, req)  # frozen after the page past it was full
        if plain:
            self._extend_own(plain)
            if self._has_window:
                others += plain  # published already; what is left is to release what is below the window
        for req in others:
            self._publisher.advance(client, req, remap)
            if req.state_in is not None:
                self._checkpoints.pass_on(client, req)

    def _is_plain(self, req: Req) -> bool:
        """Nobody can have published its next pages, and its draft's are valid up to the same length."""
        node, page_size = req.node, self._kinds.page_size
        return (
            node.lock_ref == 1
            and not node.children
            and req.aux_whole
            and req.state_in is None
            and req.aux_published == req.num_published
            and (not req.aux or req.draft_len // page_size == req.target_len // page_size)
            and self._publisher.same_draft(req)
        )

    def _extend_own(self, reqs: list[Req]) -> None:
        """Full pages of each request go to the end of its node. They change hands together, after that."""
        page_size, step = self._kinds.page_size, self._store.tree.page_bytes
        given: list[list[int]] = [[] for _ in self._kinds.token]
        for req in reqs:
            first, full = req.num_published, req.target_len // page_size
            columns = [req.tables[kind][first:full] for kind in self._kinds.token]
            self._store.tree.extend(req.node, req.tokens[first * step : full * step], columns)
            for column in range(len(columns)):
                given[column] += columns[column]
            req.num_published = req.aux_published = full
            req.next_full = (full + 1) * page_size
            if req.aux:
                req.next_aux_full = req.next_full
                req.root.num_aux += (full - first) * len(req.aux)
        for column, kind in enumerate(self._kinds.token):
            self._publisher.give(kind, given[column])
