"""Target <-> draft worker. One Propose per step for the whole batch."""

from memsvc.wire.base import BadRequest, Epoch, Msg, PageId, ReqId
from memsvc.wire.text import Sampling


class DraftHello(Msg, frozen=True):
    """First message of a target. feature_dim: hidden size; feature_dtype as torch names it.

    The draft drops every request it knows of that engine. epoch is the target's registration with
    the memory service: the draft acknowledges with AckEpoch that it touches no page of an older one.
    """

    wire_version: int
    engine: str
    epoch: Epoch
    feature_dim: int
    feature_dtype: str


class DraftReady(Msg, frozen=True):
    """What the draft wants and gives. instance differs after each restart, and its KV is gone then."""

    pid: int
    instance: int
    block_size: int
    """B: the anchor and B - 1 drafts."""
    target_layer_ids: list[int]


class DraftOpen(Msg, frozen=True):
    """The draft may read context from valid_from on; [valid_from, context_len) is in its KV already.

    pages[i] is page i of its table, 0 where it has none. tokens: prompt and answer so far, packed.
    """

    rid: ReqId
    context_len: int
    valid_from: int
    pages: list[PageId]
    prompt_len: int
    tokens: bytes
    sampling: Sampling


class Propose(Msg, frozen=True):
    """In this order: close, open, set pages, clear pages, write features, propose num_drafts tokens.

    page_*: entry page_idxs[i] of the table of page_rids[i] becomes page_ids[i]. clear_pages: zero
    these first. write_*: features of tokens [write_starts[i], write_starts[i] + write_lens[i]) of
    write_rids[i] lie in exchange rows write_rows[i] and on. rids, anchors, anchor_pos: the blocks to
    draft; the context of a block is [valid_from, anchor_pos) and must have been written by then.
    new_tokens: tokens of rids[i] since its last Propose or DraftOpen, the anchor last, packed.
    """

    closes: list[ReqId]
    opens: list[DraftOpen]
    page_rids: list[ReqId]
    page_idxs: list[int]
    page_ids: list[PageId]
    clear_pages: list[PageId]
    write_rids: list[ReqId]
    write_starts: list[int]
    write_lens: list[int]
    write_rows: list[int]
    num_drafts: int
    rids: list[ReqId]
    anchors: list[int]
    anchor_pos: list[int]
    new_tokens: list[bytes]
    step: int = 0


class Drafted(Msg, frozen=True):
    """token_ids: packed, num_drafts for each of Propose.rids in order. Times are host microseconds."""

    num_drafts: int
    token_ids: bytes
    fwd_us: float = 0.0
    head_us: float = 0.0
    select_us: float = 0.0


SpecRequest = DraftHello | Propose
SpecReply = DraftReady | Drafted | BadRequest
