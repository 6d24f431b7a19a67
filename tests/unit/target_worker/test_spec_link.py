"""The target's view of the draft: down, up, gone, silent, talking nonsense. The draft is a list of replies."""

import os

import msgspec
import pytest

from memsvc.wire.base import BadRequest, Epoch, PageId, ReqId, pack_tokens
from memsvc.wire.codec import encode
from memsvc.wire.spec import Drafted, DraftHello, DraftReady, Propose
from memsvc.wire.text import Sampling
from target_worker.draft_peer import DraftContract
from target_worker.propose import open_bytes
from target_worker.req import FeatureRows, Phase, Req
from target_worker.spec_link import SpecLink
from tests.support.scripted_rpc import ScriptedRpc

READY = DraftReady(os.getpid(), 1, 4, [0, 1])


@pytest.fixture
def rpc() -> ScriptedRpc:
    return ScriptedRpc()


@pytest.fixture
def link(rpc: ScriptedRpc) -> SpecLink:
    contract = DraftContract("main", Epoch(1), 8, "float32", 4, (0, 1))
    return SpecLink(rpc, contract)  # type: ignore[arg-type]


def up(link: SpecLink, rpc: ScriptedRpc) -> None:
    """A draft answers the next hello."""
    link._hello_at = 0.0
    rpc.replies.append(READY)
    assert link.poll()


def req(rid: int = 1, num_tokens: int = 6) -> Req:
    """A decoding request with its anchor last."""
    tokens = list(range(10, 10 + num_tokens))
    made = Req(ReqId(rid), tokens, 4, Sampling(seed=0, max_tokens=50), 0, "", 0, Phase.DECODE)
    made.computed_len = made.draft.written_len = num_tokens - 1
    return made


def test_a_draft_that_is_not_there_costs_nothing(link: SpecLink, rpc: ScriptedRpc) -> None:
    assert not link.poll()
    assert link.propose([req()], [req()], [], 3) == {}
    assert [type(msg) for msg in rpc.sent] == [DraftHello]


def test_a_full_queue_of_hellos_is_no_error(link: SpecLink, rpc: ScriptedRpc) -> None:
    rpc.is_full = True
    assert not link.poll()
    rpc.is_full = False
    up(link, rpc)


def test_a_reply_is_taken_before_the_next_hello_makes_it_an_old_one(link: SpecLink, rpc: ScriptedRpc) -> None:
    plain = rpc.send

    def send(msg: object) -> None:
        plain(msg)
        # As Rpc has it: replies to what was sent before are passed over.
        rpc.replies.clear()

    rpc.send = send  # type: ignore[method-assign]
    assert not link.poll()
    rpc.replies.append(READY)
    link._hello_at = 0.0
    assert link.poll()
    assert len(rpc.sent) == 1


@pytest.mark.parametrize(
    "reply",
    [
        BadRequest("no"),
        DraftReady(os.getpid(), 1, 8, [0, 1]),
        DraftReady(os.getpid(), 1, 4, [2]),
        msgspec.DecodeError("x"),
    ],
)
def test_a_draft_of_another_shape_is_not_used(link: SpecLink, rpc: ScriptedRpc, reply: object) -> None:
    rpc.replies.append(reply)
    assert not link.poll()
    assert not link.is_up


def test_a_block_is_proposed_once_and_told_what_is_new(link: SpecLink, rpc: ScriptedRpc) -> None:
    up(link, rpc)
    one = req()
    rpc.replies.append(Drafted(3, pack_tokens([7, 8, 9])))
    assert link.propose([one], [one], [], 3) == {1: [7, 8, 9]}
    one.tokens += [7, 8]
    one.draft.pending = [FeatureRows(5, 2, 0)]
    one.computed_len = 7
    rpc.replies.append(Drafted(3, pack_tokens([1, 2, 3])))
    link.propose([one], [one], [], 3)
    first, second = rpc.sent[-2:]
    assert isinstance(first, Propose)
    assert isinstance(second, Propose)
    assert [opened.rid for opened in first.opens] == [1]
    assert second.opens == []
    assert second.new_tokens == [pack_tokens([7, 8])]
    assert (second.write_starts, second.write_lens, second.write_rows) == ([5], [2], [0])
    assert one.draft.written_len == 7
    assert one.draft.pending == []


def test_features_of_several_steps_go_out_together_and_count_as_written(link: SpecLink, rpc: ScriptedRpc) -> None:
    up(link, rpc)
    one, two = req(1), req(2)
    for row in range(3):
        one.draft.pending.append(FeatureRows(5 + row, 1, 2 * row))
        two.draft.pending.append(FeatureRows(5 + row, 1, 2 * row + 1))
    rpc.replies.append(Drafted(0, b""))
    assert link.propose([], [one, two], [], 0) == {}
    sent = rpc.sent[-1]
    assert sent.write_rids == [1, 1, 1, 2, 2, 2]
    assert (sent.write_starts, sent.write_lens) == ([5, 6, 7] * 2, [1] * 6)
    assert sent.write_rows == [0, 2, 4, 1, 3, 5]
    assert (one.draft.written_len, one.draft.pending) == (8, [])


@pytest.mark.parametrize("reply", [BadRequest("no"), msgspec.DecodeError("x")])
def test_nonsense_instead_of_drafts_means_plain_decode_until_a_new_hello(
    link: SpecLink, rpc: ScriptedRpc, reply: object
) -> None:
    up(link, rpc)
    rpc.replies.append(reply)
    assert link.propose([req()], [req()], [], 3) == {}
    assert not link.is_up
    up(link, rpc)


def test_what_ends_while_the_draft_is_down_is_not_closed_at_the_next_one(link: SpecLink, rpc: ScriptedRpc) -> None:
    up(link, rpc)
    one, two = req(1), req(2)
    rpc.replies.append(Drafted(1, pack_tokens([7, 8])))
    link.propose([one, two], [one, two], [], 1)
    rpc.replies.append(BadRequest("no"))
    link.propose([one, two], [one, two], [], 1)
    link.close(one)
    up(link, rpc)
    two.draft.reset(5)
    rpc.replies.append(Drafted(1, pack_tokens([8])))
    link.propose([two], [two], [], 1)
    assert rpc.sent[-1].closes == []
    link.close(two)
    rpc.replies.append(Drafted(0, b""))
    link.propose([], [], [], 1)
    assert rpc.sent[-1].closes == [2]


def test_nothing_to_say_sends_nothing(link: SpecLink, rpc: ScriptedRpc) -> None:
    up(link, rpc)
    num = len(rpc.sent)
    assert link.propose([], [req()], [], 3) == {}
    assert len(rpc.sent) == num


def test_what_the_draft_says_instead_of_drafts_is_logged_without_tokens(
    link: SpecLink, rpc: ScriptedRpc, caplog: pytest.LogCaptureFixture
) -> None:
    rpc.replies.append(Drafted(1, pack_tokens([987_654])))
    assert not link.poll()
    up(link, rpc)
    rpc.replies.append(msgspec.structs.replace(READY, target_layer_ids=[987_654]))
    assert link.propose([req()], [req()], [], 3) == {}
    up(link, rpc)
    rpc.replies.append(BadRequest("rid 1 is not open"))
    assert link.propose([req()], [req()], [], 3) == {}
    assert "draft refused reply=Drafted" in caplog.text
    assert "reply=DraftReady" in caplog.text
    assert "reply=BadRequest: rid 1 is not open" in caplog.text
    assert "987654" not in caplog.text
    assert str(pack_tokens([987_654])) not in caplog.text


def small_link(rpc: ScriptedRpc, max_open_bytes: int) -> SpecLink:
    contract = DraftContract("main", Epoch(1), 8, "float32", 4, (0, 1))
    return SpecLink(rpc, contract, max_open_bytes)  # type: ignore[arg-type]


def test_requests_that_would_not_fit_one_message_are_told_in_several(rpc: ScriptedRpc) -> None:
    reqs = [req(rid, num_tokens=1000) for rid in range(1, 6)]
    link = small_link(rpc, max_open_bytes=2 * open_bytes(reqs[0]))
    up(link, rpc)
    reqs[0].draft.pending = [FeatureRows(999, 1, 7)]
    clear = [PageId(5)]
    rpc.replies += [Drafted(0, b""), Drafted(0, b""), Drafted(2, pack_tokens(range(10)))]
    drafts = link.propose(reqs, reqs, clear, 2)
    assert drafts == {rid: [2 * rid - 2, 2 * rid - 1] for rid in range(1, 6)}
    sent = rpc.sent[-3:]
    assert [[opened.rid for opened in msg.opens] for msg in sent] == [[1, 2], [3, 4], [5]]
    assert [len(msg.rids) for msg in sent] == [0, 0, 5]
    # What is zeroed must be zeroed before the first features are written.
    assert [msg.clear_pages for msg in sent] == [[5], [], []]
    assert [msg.write_rids for msg in sent] == [[1], [], []]
    assert clear == []
    assert sent[-1].new_tokens == [b""] * 5
    for msg in sent:
        assert sum(map(len, map(encode, msg.opens))) <= 2 * open_bytes(reqs[0])


def test_one_request_past_the_size_of_a_message_goes_alone(rpc: ScriptedRpc) -> None:
    link = small_link(rpc, max_open_bytes=1)
    up(link, rpc)
    rpc.replies += [Drafted(0, b""), Drafted(1, pack_tokens([1, 2]))]
    assert link.propose([req(1), req(2)], [req(1), req(2)], [], 1) == {1: [1], 2: [2]}
    assert [len(msg.opens) for msg in rpc.sent[-2:]] == [1, 1]


def test_a_draft_that_dies_between_two_of_these_messages_is_told_all_of_it_again(rpc: ScriptedRpc) -> None:
    reqs = [req(rid) for rid in (1, 2, 3)]
    link = small_link(rpc, max_open_bytes=open_bytes(reqs[0]))
    up(link, rpc)
    clear = [PageId(5)]
    rpc.replies += [Drafted(0, b""), BadRequest("no")]
    assert link.propose(reqs, reqs, clear, 1) == {}
    assert not link.is_up
    up(link, rpc)
    for one in reqs:
        one.draft.reset(5)
    rpc.replies += [Drafted(0, b""), Drafted(0, b""), Drafted(1, pack_tokens([1, 2, 3]))]
    link.propose(reqs, reqs, clear, 1)
    assert [opened.rid for msg in rpc.sent[-3:] for opened in msg.opens] == [1, 2, 3]


def test_the_size_of_an_open_is_never_taken_for_less_than_it_is() -> None:
    sampling = Sampling(
        seed=(1 << 63) - 1, max_tokens=1 << 31, temperature=0.1, top_k=1 << 30, top_p=0.1, min_p=0.1,
        stop_token_ids=[(1 << 31) - 1] * 64,
    )  # fmt: skip
    for num_tokens in (1, 300, 70_000):
        one = req((1 << 62) + 1, num_tokens)
        one.sampling = sampling
        one.draft.pages = [PageId((1 << 31) - 1)] * num_tokens
        rpc = ScriptedRpc()
        link = small_link(rpc, 1 << 30)
        up(link, rpc)
        rpc.replies.append(Drafted(0, b""))
        link.propose([one], [one], [], 0)
        assert len(encode(rpc.sent[-1].opens[0])) <= open_bytes(one)


def test_waiting_for_drafts_calls_back_so_that_the_target_does_not_look_stuck(rpc: ScriptedRpc) -> None:
    link = small_link(rpc, 1 << 20)
    up(link, rpc)
    waits: list[int] = []
    link.on_wait = lambda: waits.append(1)
    rpc.replies += [TimeoutError("not yet")] * 3 + [Drafted(1, pack_tokens([7]))]
    assert link.propose([req()], [req()], [], 1) == {1: [7]}
    assert len(waits) == 3
