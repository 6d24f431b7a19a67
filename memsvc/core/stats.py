"""Numbers for operators: the arena by kind and state, and who is open."""

from memsvc.core.page_states import FREE, LIMBO, PINNED, PRIVATE, QUARANTINE, TREE
from memsvc.core.reqs import Req, Running
from memsvc.core.store import PageStore
from memsvc.wire.admin import KindStats, ReqInfo, SnapshotReport


def kind_stats(store: PageStore) -> list[KindStats]:
    """One entry per kind; the states of each sum to num_pages_cut."""
    kinds, pool = store.kinds, store.pool
    return [
        KindStats(
            name=name,
            page_bytes=kinds.page_bytes[kind],
            num_frames=pool.num_cut[kind],
            num_pages_cut=pool.num_cut[kind] * kinds.pages_per_frame[kind],
            num_free=pool.counts[kind][FREE],
            num_private=pool.counts[kind][PRIVATE],
            num_tree=pool.counts[kind][TREE],
            num_pinned=pool.counts[kind][PINNED],
            num_limbo=pool.counts[kind][LIMBO],
            num_quarantine=pool.counts[kind][QUARANTINE],
        )
        for kind, name in enumerate(kinds.names)
    ]


def unusable_bytes(store: PageStore) -> int:
    """Bytes of free pages in cut frames: their own kind can use them, no other can."""
    return sum(counts[FREE] * size for counts, size in zip(store.pool.counts, store.kinds.page_bytes, strict=True))


def snapshot(store: PageStore, running: Running, pins: dict[str, int]) -> SnapshotReport:
    """Who is open, and how large the tree is."""
    return SnapshotReport(
        reqs=[_req_info(req, store.now) for req in running],
        num_nodes=store.tree.num_nodes,
        num_tree_tokens=store.tree.num_pages * store.kinds.page_size,
        pins=pins,
    )


def _req_info(req: Req, now: float) -> ReqInfo:
    return ReqInfo(
        rid=req.rid,
        engine=req.engine.name,
        salt=req.salt,
        priority=req.priority,
        committed_len=req.target_len,
        draft_len=req.draft_len,
        draft_valid_from=req.draft_valid_from,
        num_pages=[req.held(kind) for kind in range(len(req.tables))],
        age_s=now - req.opened_at,
    )
