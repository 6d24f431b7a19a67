"""Publisher: full pages of running requests enter the tree, and pages below the window leave them."""

from array import array

from memsvc.core.limbo import retire
from memsvc.core.outcome import Columns
from memsvc.core.page_states import PRIVATE
from memsvc.core.radix import Node
from memsvc.core.reqs import Req
from memsvc.core.sessions import Client
from memsvc.core.store import PageStore


class Publisher:
    """What happens to a request's pages as its lengths advance.

    A page that someone has published before us exists twice then. If the tree's page is in use, we
    change over to it (remap) and ours goes to limbo; if nobody holds it, ours takes its place and it
    is free at once. Either way no page gets locked that was evictable, so a promise made to the
    elder is not broken by a duplicate.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._kinds = store.kinds
        self._page_size = store.kinds.page_size

    def advance(self, client: Client, req: Req, remap: Columns) -> None:
        """The request's lengths have grown: publish what is full, release what is below the window."""
        page_size = self._page_size
        full = req.target_len // page_size
        if full > req.num_published:
            self._publish(client, req, full, remap)
            req.next_full = (full + 1) * page_size
        if not req.aux:
            return
        attachable = min(req.draft_len // page_size, full)
        if attachable > req.aux_published:
            self._attach(client, req, attachable, remap)
        req.next_aux_full = (req.aux_published + 1) * page_size
        for kind in req.aux:
            window = self._kinds.windows[kind]
            if window and (low := full - window // page_size) > req.aux_low[kind]:
                self.release_aux(client, req, kind, low)

    # --- target pages ---

    def _publish(self, client: Client, req: Req, full: int, remap: Columns) -> None:
        """Put target pages [num_published, full) into the tree and lock them."""
        step = self._store.tree.page_bytes
        tokens = bytes(req.tokens[req.num_published * step : full * step])
        position = 0
        while position < len(tokens):
            child = req.node.children.get(tokens[position : position + step])
            if child is None:
                break
            shared = self._store.tree.common_pages(child, tokens, position, len(tokens))
            if shared < child.num_pages:
                child = self._store.split(child, shared)
            self._publish_duplicates(client, req, child, remap)
            position += shared * step
        if position < len(tokens):
            self._publish_new(req, tokens[position:], full)

    def _publish_new(self, req: Req, tokens: bytes, full: int) -> None:
        """Nobody has published these pages: they go to the end of our node, or below it if it is shared."""
        node, tree = req.node, self._store.tree
        pages = req.tables[req.primary][req.num_published : full]
        self.give(req.primary, pages)
        if node.lock_ref == 1 and not node.children:
            tree.extend(node, tokens, [pages])
        else:
            req.node = tree.append(node, tokens, [pages])
            req.node.lock_ref, req.node.priority = 1, req.priority
            req.node.last_access = self._store.now
        req.num_published = full

    def same_draft(self, req: Req) -> bool:
        """Whether the namespace holds draft pages of the model that our draft is; an empty one does."""
        root = req.root
        if not root.num_aux:
            root.aux_label = req.aux_label
        return root.aux_label == req.aux_label

    def give(self, kind: int, pages: list[int]) -> None:
        """Private pages become pages of the tree that the request holds which had them."""
        self._store.pool.publish(kind, pages)
        if kind != self._kinds.primary:
            self._store.pool.hold(kind, pages)

    def _publish_duplicates(self, client: Client, req: Req, child: Node, remap: Columns) -> None:
        """The whole of child, right below our node, holds what our next pages hold."""
        first, primary, pool = req.num_published, self._kinds.primary, self._store.pool
        table = req.tables[primary]
        ours = table[first : first + child.num_pages]
        child.lock_ref += 1
        if child.lock_ref > 1:
            for offset, page in enumerate(child.columns[0]):
                table[first + offset] = page
                remap.add(req, primary, first + offset, page)
                retire(pool, client, primary, ours[offset])
        else:
            theirs, child.columns[0] = child.columns[0], array("i", ours)
            pool.drop(primary, theirs)
            pool.publish(primary, ours)
            self._store.queue_aux(child)
        child.priority = max(child.priority, req.priority)
        child.last_access = self._store.now
        req.node = child
        req.num_published += child.num_pages

    # --- draft pages ---

    def _attach(self, client: Client, req: Req, full: int, remap: Columns) -> None:
        """Put valid draft pages [aux_published, full) where the tree has none, or a duplicate."""
        low = max(req.aux_published, -(-req.draft_valid_from // self._page_size))
        req.aux_published = full
        if not self.same_draft(req):
            return
        node = req.node
        while full > low:
            start = max(low, node.start)
            if start < full:
                for kind in req.aux:
                    self._attach_run(client, req, kind, (node, start, min(full, node.end)), remap)
                full = start
            assert full <= low or node.parent is not None, f"draft pages [{low}, {full}) above the root"
            node = node.parent or node

    def _attach_run(self, client: Client, req: Req, kind: int, run: tuple[Node, int, int], remap: Columns) -> None:
        """Draft pages [low, high) of our table and the same places of the node `run` names."""
        (node, low, high), pool = run, self._store.pool
        table, states, refs = req.tables[kind], pool.state[kind], pool.refs[kind]
        column, start = node.columns[self._kinds.token.index(kind)], node.start
        for index in range(low, high):
            ours, theirs = table[index], column[index - start]
            if not ours or states[ours] != PRIVATE:
                continue
            if theirs and refs[theirs]:
                refs[theirs] += 1
                table[index] = theirs
                remap.add(req, kind, index, theirs)
                retire(pool, client, kind, ours)
                continue
            if theirs:
                pool.drop(kind, [theirs])
            else:
                req.root.num_aux += 1
            column[index - start] = ours
            self.give(kind, [ours])

    # --- giving up ---

    def release_aux(self, client: Client, req: Req, kind: int, low: int) -> None:
        """Give up draft pages below index low: private ones to limbo, the tree's unlocked."""
        table, pool = req.tables[kind], self._store.pool
        first, req.aux_low[kind] = req.aux_low[kind], low
        shared = []
        for index in range(first, min(low, len(table))):
            page, table[index] = table[index], 0
            if not page:
                continue
            if pool.state[kind][page] == PRIVATE:
                retire(pool, client, kind, page)
            else:
                shared.append(page)
        req.missing = [(k, index) for k, index in req.missing if k != kind or index >= low]
        if not req.missing:
            req.engine.incomplete.discard(req.rid)
        if shared:
            self._store.unlock_pages(kind, shared)
            self._store.note_unlocked(req.node, first, low)

    def reset_draft(self, client: Client, req: Req) -> None:
        """The draft's KV of this request is lost. Its pages from the committed length on go too: the old
        draft may have been writing them. They are missing until they are replaced.
        """
        tail = req.target_len // self._page_size
        req.draft_valid_from = req.draft_len = req.target_len
        req.aux_whole = False
        req.use(req.engine, self._kinds)
        for kind in req.aux:
            self.release_aux(client, req, kind, req.num_pages)
            req.aux_low[kind] = tail
            req.tables[kind] = [0] * req.num_pages
            req.missing += [(kind, index) for index in range(tail, req.num_pages)]
        if req.missing:
            req.engine.incomplete.add(req.rid)
        req.settle(self._page_size)

    def close(self, req: Req) -> list[tuple[int, int]]:
        """Unlock all that the request holds in the tree; returns its private pages (kind, page)."""
        private, pool = [], self._store.pool
        low = min((req.aux_low[kind] for kind in req.aux), default=0)
        for kind, table in enumerate(req.tables):
            first = req.num_published if kind == req.primary else req.aux_low[kind]
            shared = []
            for page in table[first:]:
                if not page:
                    continue
                if pool.state[kind][page] == PRIVATE:
                    private.append((kind, page))
                else:
                    shared.append(page)
            self._store.unlock_pages(kind, shared)
        self._store.unlock_path(req.node)
        if req.aux:
            self._store.note_unlocked(req.node, low, req.num_published)
        req.root.num_users -= 1
        self._store.tree.forget_if_idle(req.root)
        return private
