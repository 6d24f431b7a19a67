"""The Propose message: what the draft is told of each request, and the note of what it knows then."""

from collections.abc import Sequence

from memsvc.wire.base import PageId, ReqId, unpack_tokens
from memsvc.wire.base import pack_tokens as pack
from memsvc.wire.spec import Drafted, DraftOpen, Propose
from target_worker.req import FeatureRows, Req

_BYTES_PER_ID = 5
"""An id in msgpack, at most."""
_OPEN_BYTES = 512
"""The fields of a DraftOpen that have no length of their own."""


def make_propose(
    closes: list[ReqId], blocks: Sequence[Req], known: Sequence[Req], clear: Sequence[PageId], num_drafts: int
) -> Propose:
    """Everything that is new of the requests in known, and num_drafts drafts for those in blocks, a part of them."""
    msg = Propose(
        closes=closes,
        opens=[_open(req) for req in known if not req.draft.is_open],
        page_rids=[],
        page_idxs=[],
        page_ids=[],
        clear_pages=list(clear),
        write_rids=[],
        write_starts=[],
        write_lens=[],
        write_rows=[],
        num_drafts=num_drafts if blocks else 0,
        rids=[req.rid for req in blocks],
        anchors=[req.tokens[-1] for req in blocks],
        anchor_pos=[req.computed_len for req in blocks],
        new_tokens=[pack(req.tokens[req.draft.told_tokens :]) if req.draft.is_open else b"" for req in blocks],
    )
    for req in known:
        if req.draft.is_open:
            for idx in req.draft.changed:
                msg.page_rids.append(req.rid)
                msg.page_idxs.append(idx)
                msg.page_ids.append(req.draft.pages[idx])
        for rows in req.draft.pending:
            _add_write(msg, req.rid, rows)
    return msg


def book(msg: Propose, known: Sequence[Req]) -> None:
    """The draft has carried msg out, which was made of known."""
    blocks = set(msg.rids)
    for req in known:
        draft = req.draft
        if not draft.is_open or req.rid in blocks:
            draft.told_tokens = len(req.tokens)
        draft.is_open = True
        draft.changed.clear()
        if draft.pending:
            draft.written_len = draft.pending[-1].start + draft.pending[-1].num
            draft.pending.clear()


def split(reply: Drafted, msg: Propose) -> dict[ReqId, list[int]]:
    """Drafts by request."""
    ids, k = unpack_tokens(reply.token_ids), msg.num_drafts
    assert len(ids) == k * len(msg.rids), f"{len(ids)} drafts for {len(msg.rids)} blocks of {k}"
    return {rid: ids[i * k : (i + 1) * k] for i, rid in enumerate(msg.rids)}


def open_bytes(req: Req) -> int:
    """No less than what the DraftOpen of req takes in a message."""
    num_ids = len(req.draft.pages) + len(req.sampling.stop_token_ids)
    return _OPEN_BYTES + 4 * len(req.tokens) + _BYTES_PER_ID * num_ids


def _open(req: Req) -> DraftOpen:
    draft = req.draft
    return DraftOpen(
        req.rid, draft.written_len, draft.valid_from, draft.pages, req.prompt_len, pack(req.tokens), req.sampling
    )


def _add_write(msg: Propose, rid: ReqId, rows: FeatureRows) -> None:
    msg.write_rids.append(rid)
    msg.write_starts.append(rows.start)
    msg.write_lens.append(rows.num)
    msg.write_rows.append(rows.row)
