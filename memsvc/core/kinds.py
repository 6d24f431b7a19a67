"""The kinds of a pool as the allocator uses them: which is which, by index into Layout.kinds."""

from dataclasses import dataclass
from typing import Final

from memsvc.core.config import PoolConfig
from memsvc.wire.mem import Layout

UNBOUNDED: Final = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTable:
    """Kind numbers by role. Column c of the tree holds the pages of token kind `token[c]`."""

    names: tuple[str, ...]
    page_size: int
    page_bytes: tuple[int, ...]
    pages_per_frame: tuple[int, ...]
    token: tuple[int, ...]
    """Token kinds, the primary one first."""
    per_req: tuple[int, ...]
    """Kinds of which an open request holds a fixed number of pages."""
    pages_per_req: tuple[int, ...]
    windows: tuple[int, ...]
    """In tokens, rounded up to whole pages; 0 is no window."""
    states: tuple[int, ...]
    """The per-request kinds that checkpoints hold."""
    checkpoint_pages: int
    """Pages of text between the checkpoints of a long prompt."""
    bounds: tuple[int, ...]
    """The most pages a request holds at once, for kinds with a window; UNBOUNDED for others."""

    @property
    def primary(self) -> int:
        """The target's token kind: its pages are the tree's paths, locked as whole nodes."""
        return self.token[0]

    @property
    def aux(self) -> tuple[int, ...]:
        """Token kinds that follow draft_len: tombstones are allowed, locks count by page."""
        return self.token[1:]

    @property
    def num_kinds(self) -> int:
        """Kinds of the pool."""
        return len(self.names)

    def index(self, name: str) -> int:
        """Number of a kind. Raises ValueError naming the kinds there are."""
        if name not in self.names:
            raise ValueError(f"unknown kind {name!r}: this pool has {', '.join(self.names)}")
        return self.names.index(name)


def kind_table(config: PoolConfig, layout: Layout) -> KindTable:
    """The table of a layout made from config."""
    kinds = layout.kinds
    return KindTable(
        names=tuple(kind.name for kind in kinds),
        page_size=layout.page_size,
        page_bytes=tuple(kind.page_bytes for kind in kinds),
        pages_per_frame=tuple(kind.pages_per_frame for kind in kinds),
        token=tuple(i for i, kind in enumerate(kinds) if kind.tokens_per_page),
        per_req=tuple(i for i, kind in enumerate(kinds) if not kind.tokens_per_page),
        pages_per_req=tuple(kind.pages_per_req for kind in kinds),
        windows=tuple(-(-kind.window // layout.page_size) * layout.page_size for kind in kinds),
        states=tuple(i for i, kind in enumerate(kinds) if kind.is_state),
        checkpoint_pages=_checkpoint_pages(config, layout),
        bounds=tuple(_bound(kind.window, config) for kind in kinds),
    )


def _checkpoint_pages(config: PoolConfig, layout: Layout) -> int:
    """The configured interval, or the one that makes states cost half of the KV between them."""
    if config.checkpoint_interval:
        return max(1, config.checkpoint_interval // config.page_size)
    states = sum(kind.page_bytes * kind.pages_per_req for kind in layout.kinds if kind.is_state)
    kv = next(kind.page_bytes for kind in layout.kinds if kind.tokens_per_page)
    return max(1, round(2 * states / kv))


def _bound(window: int, config: PoolConfig) -> int:
    # [committed - window, committed + max_extend), in whole pages at both ends
    if not window or not config.max_extend_tokens:
        return UNBOUNDED
    return -(-window // config.page_size) + -(-config.max_extend_tokens // config.page_size) + 1
