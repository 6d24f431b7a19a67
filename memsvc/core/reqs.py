"""Req: one open request and the pages it holds. Running: all of them, oldest first."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memsvc.core.kinds import UNBOUNDED, KindTable
from memsvc.core.radix import TOKEN_BYTES, Checkpoint, Node, Root
from memsvc.wire.base import ReqId
from memsvc.wire.mem import OpenReq

if TYPE_CHECKING:
    from memsvc.core.sessions import Engine


class Req:
    """A request of one engine. tables[kind][i] is page i of its table of that kind.

    Target pages:  [0, num_published)            in the tree, on the path to `node`, which is locked
                   [num_published, num_pages)    private
    Draft pages:   [0, aux_low)                  0: released, or never there
                   [aux_low, num_pages)          private, or in the tree with one lock count of ours
                   places in `missing`           0 until then: lost by reset_draft, to be replaced
    State pages:   private, and written; what it reads is `state_in` as long as that is there
    """

    __slots__ = (
        "aux",
        "aux_label",
        "aux_low",
        "aux_published",
        "aux_whole",
        "draft_len",
        "draft_valid_from",
        "engine",
        "limit",
        "missing",
        "next_aux_full",
        "next_full",
        "node",
        "num_matched",
        "num_published",
        "opened_at",
        "primary",
        "priority",
        "prompt_len",
        "retract_at",
        "rid",
        "root",
        "salt",
        "slots",
        "state_in",
        "states",
        "tables",
        "target_len",
        "token_kinds",
        "tokens",
        "uid",
    )

    def __init__(self, uid: int, engine: "Engine", op: OpenReq, root: Root, kinds: KindTable) -> None:
        self.uid = uid
        """Unique over all engines, and in the order of opening: the smallest is the elder."""
        self.rid: ReqId = op.rid
        self.engine = engine
        self.root = root
        self.node: Node = root
        self.tokens = bytearray(op.tokens)
        self.prompt_len = len(op.tokens) // TOKEN_BYTES
        self.limit = 0
        """Tokens it may ever have slots for."""
        self.priority = op.priority
        self.salt = op.salt
        self.opened_at = 0.0
        self.target_len = self.draft_len = self.draft_valid_from = 0
        self.primary = kinds.primary
        self.aux: tuple[int, ...] = ()
        self.token_kinds: tuple[int, ...] = ()
        """Token kinds it holds pages of, the target's first; the others are `aux`."""
        self.states: tuple[int, ...] = ()
        """Kinds of its recurrent state."""
        self.aux_label = ""
        """Whose draft pages it can share."""
        self.use(engine, kinds)
        self.aux_whole = self._holds_all(kinds)
        """It has every draft page from its hit on, valid: never reset."""
        self._hold_nothing(kinds)
        self.retract_at = 0.0
        """When its engine is fenced unless it has closed this request by then; 0 if not asked to."""

    def _hold_nothing(self, kinds: KindTable) -> None:
        self.tables: list[list[int]] = [[] for _ in kinds.names]
        self.num_matched = 0
        """Pages of its prompt that were cached when it was opened, with or without a state to go on from."""
        self.num_published = 0
        self.aux_published = 0
        """Draft pages below this index are attached to the tree, or never will be."""
        self.aux_low = [0] * kinds.num_kinds
        self.missing: list[tuple[int, int]] = []
        """(kind, index)"""
        self.state_in: Checkpoint | None = None
        """The checkpoint that it goes on from, locked until it has written a state of its own."""
        self.slots = 0
        """Tokens it has places for: all of num_pages."""
        self.next_full = 0
        """The target_len that fills the next page to publish."""
        self.next_aux_full = 0
        """The draft_len that fills the next page to attach."""

    @property
    def num_pages(self) -> int:
        """Entries of each token kind's table."""
        return len(self.tables[self.primary])

    @property
    def has_state(self) -> bool:
        """Its model is recurrent: it can go on from a checkpoint only."""
        return bool(self.states)

    @property
    def num_known(self) -> int:
        """Tokens of prompt and answer that memsvc has been told."""
        return len(self.tokens) // TOKEN_BYTES

    def use(self, engine: "Engine", kinds: KindTable) -> None:
        """Hold pages of the engine's kinds, for its draft of now."""
        self.aux_label = engine.aux_label
        self.aux = tuple(kind for kind in kinds.aux if kind in engine.kinds)
        self.token_kinds = (kinds.primary, *self.aux)
        self.states = tuple(kind for kind in kinds.states if kind in engine.kinds)

    def _holds_all(self, kinds: KindTable) -> bool:
        return self.aux == kinds.aux

    def settle(self, page_size: int) -> None:
        """Bring what is derived for speed up to date, after tables or published pages have changed."""
        self.slots = self.num_pages * page_size
        self.next_full = (self.num_published + 1) * page_size
        self.next_aux_full = (self.aux_published + 1) * page_size if self.aux else UNBOUNDED

    def held(self, kind: int) -> int:
        """Pages of one kind that it holds now."""
        have = len(self.tables[kind]) - self.aux_low[kind]
        return have - self.num_missing(kind) if self.missing else have

    def num_missing(self, kind: int) -> int:
        """Places of its table of one kind that wait for a page."""
        return sum(1 for missing, _ in self.missing if missing == kind)


class Running:
    """Open requests of all engines by uid, oldest first."""

    def __init__(self) -> None:
        self._by_uid: OrderedDict[int, Req] = OrderedDict()
        self.filling: dict[int, Req] = {}
        """Requests whose table does not cover their prompt yet."""
        self.elder: Req | None = None
        """The oldest; it is never retracted while others run."""

    def __len__(self) -> int:
        return len(self._by_uid)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._by_uid.values())

    def get(self, uid: int) -> Req | None:
        """The open request of that uid."""
        return self._by_uid.get(uid)

    def add(self, req: Req) -> None:
        """A request was opened."""
        self._by_uid[req.uid] = req
        if self.elder is None:
            self.elder = req

    def remove(self, req: Req) -> None:
        """A request was closed."""
        del self._by_uid[req.uid]
        self.filling.pop(req.uid, None)
        if self.elder is req:
            self.elder = next(iter(self._by_uid.values()), None)
