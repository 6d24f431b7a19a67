"""The 27B geometry of the pool benchmark, and the pool that each mode makes of the same bytes."""

from dataclasses import dataclass

from memsvc.core.config import PoolConfig
from memsvc.wire.mem import KindSpec

GIB = 1 << 30
PAGE_SIZE = 16
TARGET_TOKEN_BYTES = 64 << 10
"""16 attention layers of 4 KV heads of 256, K and V, bf16."""
DRAFT_TOKEN_BYTES = 20 << 10
DRAFT_WINDOW = 2048
NUM_DRAFTS = 8
BLOCK_SIZE = NUM_DRAFTS + 1
STATE_LAYERS = 48
STATE_BYTES = 48 * 128 * 128 * 4 + 3 * 10240 * 2
"""One layer: 48 heads of a 128 x 128 fp32 state, and 3 columns of 10,240 bf16 before the convolution."""
RING_ROW_BYTES = 10240 * 2 + 2 * 48 * 4
"""One token and layer: the projection before the convolution (bf16), g and beta (fp32)."""
RING_BYTES = (PAGE_SIZE + 2 * BLOCK_SIZE) * RING_ROW_BYTES
RING_PAGES = 2
"""Pages of one layer's ring in the one pool: halves fill its frames."""
MAX_EXTEND = 2048
"""Prompt tokens of one request in one forward."""
SLACK = 2 * BLOCK_SIZE
COMMITTED = 4
"""Tokens that a decoding request commits in one step: 3 accepted and the bonus token."""
MAX_RUNNING = 256

MODES = ("unified", "static-scratch", "static-ring", "padded", "padded-ring")
SPLIT = ("static-scratch", "static-ring")
"""Modes whose memory is divided by a ratio."""

PADDED_PAGE_SIZE = -(-STATE_BYTES // TARGET_TOKEN_BYTES)
"""The fewest tokens whose target KV is at least one layer's state."""
PADDED_BYTES = PADDED_PAGE_SIZE * TARGET_TOKEN_BYTES
RINGS_PER_PADDED_PAGE = PADDED_BYTES // RING_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One way to use the memory: a pool for the manager, and what lies outside it."""

    name: str
    config: PoolConfig
    content_bytes: tuple[int, ...]
    """By kind, what a page holds without padding."""
    state_pool_bytes: int = 0
    """Split modes: bytes of the pool of states."""
    state_run_bytes: int = 0
    """Split modes: bytes of that pool that a running request holds."""
    scratch_bytes: int = 0
    """Bytes a running request holds for states after each row of a block, wherever they lie."""


def make_mode(name: str, arena_bytes: int, ratio: float = 0.0) -> Mode:
    """A mode over arena_bytes in all. ratio R gives states R/(1+R) of them in the split modes."""
    if name == "unified":
        kinds = _kinds(PAGE_SIZE, state=1, ring=0)
        half = {"page_bytes": RING_BYTES // RING_PAGES, "pages_per_req": STATE_LAYERS * RING_PAGES}
        return _pool(name, arena_bytes, [*kinds, KindSpec(name="ring", tokens_per_page=0, **half)])
    if name in SPLIT:
        return _split(name, arena_bytes, ratio)
    kinds = _kinds(PADDED_PAGE_SIZE, state=1, ring=0 if name == "padded" else STATE_LAYERS // RINGS_PER_PADDED_PAGE)
    content = [kind.page_bytes for kind in kinds]
    if name == "padded":
        pages = NUM_DRAFTS * STATE_LAYERS
        kinds.append(KindSpec(name="scratch", page_bytes=STATE_BYTES, tokens_per_page=0, pages_per_req=pages))
        content.append(STATE_BYTES)
    else:
        content[-1] = RING_BYTES * RINGS_PER_PADDED_PAGE
    padded = [_padded(kind) for kind in kinds]
    scratch = NUM_DRAFTS * STATE_LAYERS * STATE_BYTES if name == "padded" else 0
    return Mode(
        name=name, config=_config(arena_bytes, padded), content_bytes=tuple(content), scratch_bytes=scratch
    )  # fmt: skip


def _kinds(page_size: int, state: int, ring: int) -> list[KindSpec]:
    """Token kinds, then `state` states a request and `ring` pages of rings, 0 for none."""
    kinds = [
        KindSpec(name="target_kv", page_bytes=page_size * TARGET_TOKEN_BYTES, tokens_per_page=page_size),
        KindSpec(
            name="draft_kv", page_bytes=page_size * DRAFT_TOKEN_BYTES, tokens_per_page=page_size, window=DRAFT_WINDOW
        ),
    ]
    if state:
        pages = state * STATE_LAYERS
        kinds.append(
            KindSpec(name="state", page_bytes=STATE_BYTES, tokens_per_page=0, pages_per_req=pages, is_state=True)
        )
    if ring:
        kinds.append(KindSpec(name="ring", page_bytes=RING_BYTES, tokens_per_page=0, pages_per_req=ring))
    return kinds


def _padded(kind: KindSpec) -> KindSpec:
    return KindSpec(
        name=kind.name,
        page_bytes=PADDED_BYTES,
        tokens_per_page=kind.tokens_per_page,
        pages_per_req=kind.pages_per_req,
        window=kind.window,
        is_state=kind.is_state,
    )


def _config(arena_bytes: int, kinds: list[KindSpec]) -> PoolConfig:
    page_size = kinds[0].tokens_per_page
    return PoolConfig(
        arena_bytes=arena_bytes, page_size=page_size, kinds=kinds, slack_tokens=SLACK, max_extend_tokens=MAX_EXTEND
    )


def _pool(name: str, arena_bytes: int, kinds: list[KindSpec]) -> Mode:
    return Mode(
        name=name, config=_config(arena_bytes, kinds), content_bytes=tuple(kind.page_bytes for kind in kinds)
    )  # fmt: skip


def _split(name: str, arena_bytes: int, ratio: float) -> Mode:
    state = STATE_LAYERS * STATE_BYTES
    states = int(arena_bytes * ratio / (1 + ratio))
    kinds = _kinds(PAGE_SIZE, state=0, ring=0)
    scratch = BLOCK_SIZE * state if name == "static-scratch" else 0
    ring = STATE_LAYERS * RING_BYTES if name == "static-ring" else 0
    return Mode(
        name=name,
        config=_config(arena_bytes - states, kinds),
        content_bytes=tuple(kind.page_bytes for kind in kinds),
        state_pool_bytes=states,
        state_run_bytes=state + scratch + ring,
        scratch_bytes=scratch,
    )
