"""The fake draft that end-to-end tests rely on."""

import msgspec

from memsvc.wire.base import BadRequest, ReqId, pack_tokens, unpack_tokens
from memsvc.wire.spec import DraftOpen, Propose
from tests.support.draft_rig import GREEDY
from tests.support.fake_draft import FakeDraft, FakeDraftConfig

SEQUENCES = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9, 9]]
EMPTY = Propose([], [], [], [], [], [], [], [], [], [], 3, [], [], [], [])


def fake(**changes) -> FakeDraft:
    return FakeDraft(FakeDraftConfig(run_dir="", continuations="", block_size=4, **changes), SEQUENCES)


def propose(draft: FakeDraft, tokens: list[int], new: list[int], *, is_open: bool) -> list[int]:
    opened = DraftOpen(ReqId(1), 0, 0, [], 1, pack_tokens(tokens), GREEDY)
    every = tokens + new
    msg = msgspec.structs.replace(
        EMPTY,
        opens=[] if is_open else [opened],
        rids=[ReqId(1)],
        anchors=[every[-1]],
        anchor_pos=[len(every) - 1],
        new_tokens=[pack_tokens(new)],
    )
    reply = draft.propose(msg)
    assert not isinstance(reply, BadRequest), reply
    return unpack_tokens(reply.token_ids)


def test_it_goes_on_as_the_sequence_with_that_prefix_does():
    draft = fake()
    assert propose(draft, [1, 2], [], is_open=False) == [3, 4, 5]
    # The answer turns out to be the other sequence, then one that nobody knows.
    assert propose(draft, [1, 2], [9], is_open=True) == [9, 9, 0]
    assert propose(draft, [1, 2, 9], [7], is_open=True) == [0, 0, 0]


def test_past_the_end_of_a_sequence_it_says_zero():
    assert propose(fake(), [1, 2, 3, 4, 5, 6, 7], [], is_open=False) == [8, 0, 0]


def test_an_anchor_that_does_not_follow_is_refused():
    msg = msgspec.structs.replace(
        EMPTY,
        opens=[DraftOpen(ReqId(1), 0, 0, [], 1, pack_tokens([1, 2]), GREEDY)],
        rids=[ReqId(1)],
        anchors=[3],
        anchor_pos=[2],
        new_tokens=[b""],
    )
    assert isinstance(fake().propose(msg), BadRequest)


def test_a_share_of_drafts_is_wrong_and_always_the_same_ones():
    long = [list(range(1, 2001))]
    drafts = []
    for _ in range(2):
        draft = FakeDraft(FakeDraftConfig(run_dir="", continuations="", block_size=4, p_wrong=0.3), long)
        drafts.append([t for at in range(1, 1900, 3) for t in propose(draft, long[0][:at], [], is_open=False)])
    assert drafts[0] == drafts[1]
    share = sum(token != index for index, token in enumerate(drafts[0], start=2)) / len(drafts[0])
    assert 0.25 < share < 0.35
