"""Worker <-> memory service. One Step per scheduler step carries all that changes: commits, pages, opens, closes."""

from memsvc.wire.base import BadRequest, Done, Epoch, Msg, PageId, ReqId


class KindSpec(Msg, frozen=True):
    """What a page of one kind holds. tokens_per_page 0 marks a per-request kind (state, ring)."""

    name: str
    page_bytes: int
    tokens_per_page: int
    pages_per_req: int = 0
    """Per-request kinds: pages every open request holds. Token kinds: 0."""
    window: int = 0
    """Token kinds: only the last `window` tokens are ever read; 0 means all of them."""
    is_state: bool = False
    """Per-request kinds: the pages sum up everything before some token (a recurrent state), so a copy
    that stands at a page boundary lets another request go on from there."""


class KindLayout(Msg, frozen=True):
    """Where the pages of one kind lie: byte address = arena base + page_id * stride_bytes."""

    name: str
    page_bytes: int
    tokens_per_page: int
    pages_per_req: int
    window: int
    pages_per_frame: int
    stride_bytes: int
    num_pages: int
    """Ids are in [pages_per_frame, num_pages); 0 is the dummy page, 1..pages_per_frame-1 do not exist."""
    is_state: bool = False


class Layout(Msg, frozen=True):
    """The arena as a worker maps it. Index into `kinds` is the kind number used everywhere else."""

    arena_bytes: int
    frame_bytes: int
    num_frames: int
    page_size: int
    kinds: list[KindLayout]
    exchange_offset: int
    exchange_bytes: int
    shared_offset: int = 0
    shared_bytes: int = 0
    """Weights that one client fills at its start and others read after it has said so; 0 = none."""


class Register(Msg, frozen=True):
    """Join as (engine, role). A second registration of the same pair fences the first.

    kinds lists the names this client reads or writes; each must be a kind of the service. For
    rank-parallel workers every rank registers the same kinds. pid 0 marks a remote client, which
    then lives by its lease alone.
    """

    wire_version: int
    engine: str
    role: str
    """"target" owns requests; "draft" co-writes those of its engine's target."""
    kinds: list[str]
    model_fingerprint: str
    pid: int


class Registered(Msg, frozen=True):
    """epoch goes into every later message. fd_endpoint is the Unix socket that hands out the arena."""

    epoch: Epoch
    layout: Layout
    lease_ms: int
    fd_endpoint: str


class OpenReq(Msg, frozen=True):
    """Open rid over prompt `tokens` (packed int32). salt separates namespaces.

    max_new is the most tokens it may generate; TooLarge is decided on the prompt plus max_new.
    """

    rid: ReqId
    tokens: bytes
    max_new: int
    salt: str = ""
    priority: int = 0
    """Higher is more important: retracted later, evicted later under the priority policy."""


class Commit(Msg, frozen=True):
    """Lengths whose KV is final, in tokens, and the tokens past those memsvc already knows.

    After it, known tokens >= target_lens[i] >= draft_lens[i]; lengths never go back.
    """

    rids: list[ReqId]
    target_lens: list[int]
    draft_lens: list[int]
    tokens: list[bytes]


class Freeze(Msg, frozen=True):
    """The state of rids[i] stands at lens[i] tokens: a page boundary, committed, past where it came from.

    Its pages become a checkpoint of the tree and are never written again; the request reads them until
    it writes a state into other ones. For a request that goes on, the reply names these in remap; if it
    does not, there was no room, or a checkpoint is there already, and the request keeps its pages. The
    pages of a request that the same Step closes are given away, which needs no room. Nothing that runs
    beside this Step may write them.
    """

    rids: list[ReqId]
    lens: list[int]


class Close(Msg, frozen=True):
    """End requests. What is full and committed stays in the tree, the rest goes to limbo."""

    rids: list[ReqId]
    reason: str = "finish"
    """finish, abort or retract; counted, and nothing else depends on it."""


class Reserve(Msg, frozen=True):
    """Slots for nums[i] tokens past the committed length, in every token kind; all requests or none."""

    rids: list[ReqId]
    nums: list[int]


class ResetDraft(Msg, frozen=True):
    """The draft lost its KV of these requests: draft_valid_from becomes the committed length."""

    rids: list[ReqId]


class Step(Msg, frozen=True):
    """One scheduler step: commit, freeze, reset_draft, close, reserve, open, in that order, None = nothing.

    num is consecutive from 1 within an epoch. One of the last four nums gets the same reply again; an
    older one and a gap are a BadRequest. done_step is the num of the newest Step whose grants no running kernel can still
    use: the num whose forward, on every rank and in the draft, has ended. Pages freed by Step s
    leave limbo when done_step >= s.
    """

    epoch: Epoch
    num: int
    done_step: int
    commit: Commit | None = None
    reset_draft: ResetDraft | None = None
    closes: list[Close] = []
    reserve: Reserve | None = None
    opens: list[OpenReq] = []
    freeze: Freeze | None = None


class Opened(Msg, frozen=True):
    """prefix_len tokens are cached: pages[kind][i] is page i of the hit, 0 where there is none.

    Per-request kinds list their pages_per_req pages. The draft may read tokens from
    draft_valid_from on. checkpoint_at: lengths, ascending, at which the state is worth a Freeze.
    state_in: by kind the pages of the state at prefix_len, to be read and never written; empty for
    other kinds, and everywhere if prefix_len is 0. They are kept for rid until the first Step that
    commits a whole page past prefix_len is done; the same holds for what rid freezes later.
    """

    rid: ReqId
    prefix_len: int
    pages: list[list[PageId]]
    draft_valid_from: int
    checkpoint_at: list[int] = []
    state_in: list[list[PageId]] = []


class TooLarge(Msg, frozen=True):
    """rid can never fit: pages needed and usable per kind, frames needed and usable in all."""

    rid: ReqId
    needs: list[int]
    usable: list[int]
    frames_needed: int
    frames_usable: int


class NoRoom(Msg, frozen=True):
    """Not now. Page vectors by kind: what was asked, what is free or evictable, what limbo holds.

    victims: requests of this client to retract, in this order, for the reservation to fit: the least
    important first, among equals the newest. Empty if waiting for limbo, quarantine or another engine
    is enough.
    """

    needs: list[int]
    has: list[int]
    limbo: list[int]
    victims: list[ReqId]
    waiting_on: str = ""
    """"limbo", "quarantine", "other engine", "watermark" or empty."""


class Stepped(Msg, frozen=True):
    """What a Step changed, in columns: row i of grow_* is one new page-table entry.

    grow: page grow_pages[i] stands at index grow_idxs[i] of request grow_rids[i]'s table of kind
    grow_kinds[i]. remap: the same form; the old page at that place may be read until the next
    forward. clear: pages that come from another kind and hold its bytes: zero them first, before the
    Step after the next one is sent, for from then on they may be somebody else's; or never.
    opened has one entry for each open tried, in order; opens past it were not tried and stay the
    caller's. retract: requests of this client that memsvc wants back within retract_ms.
    """

    num: int
    grow_rids: list[ReqId] = []
    grow_kinds: list[int] = []
    grow_idxs: list[int] = []
    grow_pages: list[PageId] = []
    remap_rids: list[ReqId] = []
    remap_kinds: list[int] = []
    remap_idxs: list[int] = []
    remap_pages: list[PageId] = []
    clear_kinds: list[int] = []
    clear_pages: list[PageId] = []
    no_room: NoRoom | None = None
    """The reservation did not fit: commit and close stand, nothing was reserved or opened."""
    opened: list[Opened | TooLarge] = []
    open_no_room: NoRoom | None = None
    """The open after the last of `opened` did not fit."""
    retract: list[ReqId] = []
    retract_ms: int = 0


class Fenced(Msg, frozen=True):
    """The epoch is over, and nothing was changed.

    Another registration took the place, the client left, its process ended, a request that was asked
    back was kept past retract_ms, or the lease of a client with pid 0 ran out.
    """

    epoch: Epoch


class Renew(Msg, frozen=True):
    """Keeps the lease of an idle client."""

    epoch: Epoch


class Leave(Msg, frozen=True):
    """The client ends on its own accord: its requests close at once, without quarantine."""

    epoch: Epoch


class AckEpoch(Msg, frozen=True):
    """A co-writer (registered as `epoch`) no longer touches pages of its engine's epochs before `fenced_before`."""

    epoch: Epoch
    fenced_before: Epoch


MemRequest = Register | Step | Renew | Leave | AckEpoch
MemReply = Registered | Stepped | Done | BadRequest | Fenced
