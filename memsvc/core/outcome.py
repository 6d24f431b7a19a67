"""What a step changed, gathered in columns while it is carried out."""

from typing import cast

from memsvc.core.reqs import Req
from memsvc.wire.base import PageId, ReqId
from memsvc.wire.mem import NoRoom, Opened, Stepped, TooLarge


class Outcome:
    """The reply to one step in the making."""

    __slots__ = ("grow", "no_room", "open_no_room", "opened", "remap")

    def __init__(self) -> None:
        self.grow = Columns()
        self.remap = Columns()
        self.no_room: NoRoom | None = None
        self.opened: list[Opened | TooLarge] = []
        self.open_no_room: NoRoom | None = None

    def reply(self, num: int, to_clear: list[tuple[int, int]], retract: list[ReqId], retract_ms: int) -> Stepped:
        """The finished message."""
        grow, remap = self.grow, self.remap
        return Stepped(
            num=num,
            grow_rids=grow.rids,
            grow_kinds=grow.kinds,
            grow_idxs=grow.idxs,
            grow_pages=cast("list[PageId]", grow.pages),
            remap_rids=remap.rids,
            remap_kinds=remap.kinds,
            remap_idxs=remap.idxs,
            remap_pages=cast("list[PageId]", remap.pages),
            clear_kinds=[kind for kind, _ in to_clear],
            clear_pages=cast("list[PageId]", [page for _, page in to_clear]),
            no_room=self.no_room,
            opened=self.opened,
            open_no_room=self.open_no_room,
            retract=retract,
            retract_ms=retract_ms if retract else 0,
        )


class Columns:
    """Rows of (rid, kind, index, page)."""

    __slots__ = ("idxs", "kinds", "pages", "rids")

    def __init__(self) -> None:
        self.rids: list[ReqId] = []
        self.kinds: list[int] = []
        self.idxs: list[int] = []
        self.pages: list[int] = []

    def add(self, req: Req, kind: int, index: int, page: int) -> None:
        """Page `page` stands at `index` of req's table of `kind`."""
        self.rids.append(req.rid)
        self.kinds.append(kind)
        self.idxs.append(index)
        self.pages.append(page)

    def keep(self, reqs: "dict[ReqId, Req]") -> None:
        """Leave out the rows of requests that are not in reqs: closed by the same step."""
        rows = [row for row in zip(self.rids, self.kinds, self.idxs, self.pages, strict=True) if row[0] in reqs]
        self.rids = [row[0] for row in rows]
        self.kinds = [row[1] for row in rows]
        self.idxs = [row[2] for row in rows]
        self.pages = [row[3] for row in rows]
