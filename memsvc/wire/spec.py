"""Target <-> draft worker. One Propose or Plan per step for the whole batch.

Propose is for CPU memory: host code knows lengths and tokens, and drafts come back in the reply. Plan is
for a CUDA arena: it is sent before the verify it follows has ended, so it names places and no lengths, and
drafts stay on the device. DraftReady.plans says which of the two a draft serves.
"""

from memsvc.wire.base import BadRequest, Epoch, Msg, PageId, ReqId
from memsvc.wire.text import Sampling


class ExchangeMap(Msg, frozen=True):
    """Where things lie in the exchange of a CUDA arena, in bytes from its start. The target decides, once.

    slots: the hand-over words F and D and the state of num_slots requests besides slot 0, the dummy, which both
    processes read and write (memsvc/slot_layout.py); zeroed by the target before its first DraftHello. features:
    num_rows rows of feature_dim numbers a tap, all taps side by side.
    """

    slots: int
    num_slots: int
    features: int
    num_rows: int


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
    exchange: ExchangeMap | None = None
    """For Plan; None if the exchange holds nothing but feature rows."""


class DraftReady(Msg, frozen=True):
    """What the draft wants and gives. instance differs after each restart, and its KV is gone then.

    When it is sent, nothing that the draft was given before runs or waits on the device any more.
    """

    pid: int
    instance: int
    block_size: int
    """B: the anchor and B - 1 drafts."""
    target_layer_ids: list[int]
    plans: bool = False
    """Plan is served, and Propose is not."""
    number: int = 0
    """No smaller than either hand-over word: Plan.number and what the target writes to F are greater from now on."""


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


class SlotOpen(Msg, frozen=True):
    """A slot's page table from now on: pages[i] is page i, 0 where it has none or none yet."""

    slot: int
    pages: list[PageId]


class Plan(Msg, frozen=True):
    """One turn of the draft on the device: sent when the verify before it is submitted, before that has ended.

    The draft enqueues on its stream, in this order: wait until F >= after; close, open and set pages;
    zero clear_pages; write the prompt features; for every member write the features of its newest verify
    (num_rows of its slot); if num_drafts is not 0, propose and set drafts and num_drafts of every member's
    slot; write D = number. number is greater than that of any Plan before.

    Everything about lengths is read from the slots when the turn runs: a block begins at `length` with
    `anchor`, its context is [valid_from, length), and the features of [length - num_rows, length) lie in exchange
    rows from feature_row on. A member whose slot is done costs time and does no harm.
    page_*, clear_pages and write_* as in Propose, with slots in place of rids.
    """

    number: int
    after: int
    closes: list[int]
    opens: list[SlotOpen]
    page_slots: list[int]
    page_idxs: list[int]
    page_ids: list[PageId]
    clear_pages: list[PageId]
    write_slots: list[int]
    write_starts: list[int]
    write_lens: list[int]
    write_rows: list[int]
    members: list[int]
    num_drafts: int


class Planned(Msg, frozen=True):
    """All of Plan `number` is on the draft's stream; when it has run, only D tells.

    host_us: time it took to put it there. Device times, in microseconds, are those of the newest turn that was
    traced and has ended, by its number; 0 if there is none.
    """

    number: int
    host_us: float = 0.0
    traced: int = 0
    fwd_us: float = 0.0
    head_us: float = 0.0
    select_us: float = 0.0
    mem_us: float = 0.0


SpecRequest = DraftHello | Propose | Plan
SpecReply = DraftReady | Drafted | Planned | BadRequest
