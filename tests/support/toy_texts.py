"""Prompts for the toy engine, and what must hold when it has ended."""

import random

from memsvc.wire.admin import Check, Flush, GetStats
from tests.support.toy_server import ToyServer


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens, none of them EOS."""
    rng = random.Random(seed)
    return [rng.randrange(8, 1000) for _ in range(length)]


def settle(engine: ToyServer) -> None:
    """All texts are right, every page is free or in the tree, and the tree can be evicted to its last page."""
    engine.check_texts()
    report = engine.manager.handle_admin(Check())
    assert report.problems == []
    assert report.leaked_bytes == 0
    stats = engine.manager.handle_admin(GetStats())
    for kind in stats.kinds:
        assert kind.num_free + kind.num_tree == kind.num_pages_cut, kind
    assert stats.num_reqs == 0
    engine.manager.handle_admin(Flush())
    stats = engine.manager.handle_admin(GetStats())
    assert stats.frames_empty == stats.num_frames - 1
