"""A Step with a mistake changes nothing and says what is wrong, with the numbers."""

import pytest

from memsvc.wire.admin import GetStats, Stats
from memsvc.wire.base import BadRequest, ReqId
from memsvc.wire.mem import Close, Commit, Reserve, ResetDraft
from tests.support.mem_builders import Engine, make_commit, make_manager

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("commit", "text"),
    [
        (make_commit(2, 1, 1, []), "rid 2 is not open"),
        (make_commit(1, 9, 9, []), "to 9, 9 with 8 + 0 tokens known"),
        (make_commit(1, 9, 9, [1]), "8 slots"),
        (make_commit(1, 3, 3, []), "from target 4, draft 4 to 3, 3"),
        (make_commit(1, 6, 3, []), "to 6, 3"),
        (make_commit(1, 6, 7, []), "to 6, 7"),
        (make_commit(1, 6, 6, [0] * 99), "8 + 99 tokens known of at most 20"),
        (Commit([ReqId(1)], [6], [6], [b"abc"]), "8 + 0.75 tokens"),
        (Commit([ReqId(1)] * 2, [6] * 2, [6] * 2, [b""] * 2), "repeated rids"),
        (Commit([ReqId(1)], [6], [], [b""]), "unequal length"),
    ],
)
def test_a_wrong_commit_changes_nothing_and_says_what_is_wrong(commit: Commit, text: str) -> None:
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    engine.reserve(1, 8)
    engine.commit(1, 4)
    before = engine.manager.handle_admin(GetStats())
    reply = engine.send(commit=commit, reserve=Reserve([ReqId(1)], [8]))
    assert isinstance(reply, BadRequest)
    assert text in reply.reason
    after = engine.manager.handle_admin(GetStats())
    assert isinstance(before, Stats)
    assert isinstance(after, Stats)
    assert before.kinds == after.kinds
    engine.commit(1, 8)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"closes": [Close([ReqId(7)])]}, "close: rid 7 is not open"),
        ({"closes": [Close([ReqId(1)]), Close([ReqId(1)])]}, "close: rids repeat"),
        ({"closes": [Close([ReqId(1)], "bored")]}, "reason 'bored'"),
        ({"reset_draft": ResetDraft([ReqId(7)])}, "reset_draft: rid 7 is not open"),
        ({"reserve": Reserve([ReqId(1)], [1, 2])}, "1 rids, 1 different, 2 nums"),
        ({"reserve": Reserve([ReqId(7)], [1])}, "reserve: rid 7 is not open"),
        ({"reserve": Reserve([ReqId(1)], [-1])}, "at least 0"),
        ({"reserve": Reserve([ReqId(1)], [21])}, "up to 21, its limit is 20 (prompt + max_new + 4)"),
        ({"reserve": Reserve([ReqId(1)], [2]), "closes": [Close([ReqId(1)])]}, "reserve: rids {1} are closed"),
        ({"done_step": 2}, "done_step 2 of step 2"),
    ],
)
def test_a_wrong_step_is_refused_whole(parts: dict, text: str) -> None:
    engine = Engine(make_manager(40))
    engine.open(1, TEXT)
    reply = engine.send(**parts)
    assert isinstance(reply, BadRequest)
    assert text in reply.reason
    engine.close(1)
