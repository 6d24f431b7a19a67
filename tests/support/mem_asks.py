"""What tests of the memory manager do and ask again and again."""

from typing import Any

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import Flush, Match, Matched
from memsvc.wire.base import pack_tokens
from memsvc.wire.mem import Opened, Stepped
from tests.support.mem_builders import (
    NAMES,
    RECURRENT,
    Engine,
    check,
    make_manager,
    stats_of,
)

S = 2
"""Number of the kind of state."""


def recurrent(num_frames: int = 60, **config: Any) -> Engine:
    """An engine of a recurrent model, alone in its pool."""
    return Engine(make_manager(num_frames, list(RECURRENT), **config), kinds=NAMES)


def opened(reply: Stepped) -> Opened:
    """The one open of the reply, which was admitted."""
    [answer] = reply.opened
    assert isinstance(answer, Opened), answer
    return answer


def moved(reply: Stepped) -> list[int]:
    """The pages that the request writes its state to from now on."""
    rows = list(zip(reply.remap_kinds, reply.remap_idxs, reply.remap_pages, strict=True))
    assert [(kind, index) for kind, index, _ in rows] == ([(S, 0), (S, 1)] if rows else [])
    return [page for _, _, page in rows]


def committed(engine: Engine, rid: int, tokens: list[int], start: int = 0, **fields: Any) -> list[int]:
    """Open rid and commit its prompt; returns its state pages. A hit of `start` tokens is expected."""
    answer = opened(engine.run(rid, tokens, **fields))
    assert answer.prefix_len == start
    return list(answer.pages[S])


def frozen(engine: Engine, rid: int, tokens: list[int], *lens: int) -> list[int]:
    """A request that ends with checkpoints at lens; returns the pages of the last."""
    pages = committed(engine, rid, tokens)
    for length in lens[:-1]:
        pages = moved(engine.freeze(rid, length))
    engine.close(rid, freeze_at=lens[-1])
    return pages


def state_len(manager: MemoryManager, tokens: list[int]) -> int:
    """The last checkpoint of these tokens."""
    matched = manager.handle_admin(Match(tokens=pack_tokens(tokens)))
    assert isinstance(matched, Matched)
    return matched.state_len


def num_checkpoints(engine: Engine) -> int:
    """In the tree now."""
    check(engine.manager)
    return stats_of(engine.manager).num_checkpoints


def pages(manager: MemoryManager, state: str) -> list[int]:
    """Pages in one state, by kind."""
    check(manager)
    return [getattr(kind, f"num_{state}") for kind in stats_of(manager).kinds]


def cached(manager: MemoryManager, tokens: list[int]) -> int:
    """Tokens of target pages."""
    found = manager.handle_admin(Match(tokens=pack_tokens(tokens)))
    assert isinstance(found, Matched)
    return found.prefix_len


def assert_empty_after_flush(engine: Engine) -> None:
    """Nothing runs: all that is left is cache, and it can go."""
    engine.step(done_step=engine.num)
    engine.manager.handle_admin(Flush())
    check(engine.manager)
    stats = stats_of(engine.manager)
    assert (stats.frames_empty + 1, stats.num_checkpoints) == (stats.num_frames, 0)
