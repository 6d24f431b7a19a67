"""The draft worker on a CUDA device as the target talks to it: greeting, order, faults, and refusals that change nothing."""

import msgspec
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.wire.base import BadRequest, Epoch
from memsvc.wire.codec import decoder, encode
from memsvc.wire.spec import (
    DraftHello,
    DraftReady,
    ExchangeMap,
    Plan,
    Planned,
    Propose,
    SlotOpen,
    SpecReply,
    SpecRequest,
)
from tests.support.make_drafter import V2
from tests.support.plan_rig import EMPTY, NUM_SLOTS, PlanRig, merged

FULL = Plan(7, 6, [3], [SlotOpen(3, [4, 0])], [3], [1], [5], [5], [3], [0], [2], [9], [3, 1], 2)


@pytest.fixture
def rig(tmp_path) -> PlanRig:
    rig = PlanRig(tmp_path, V2, "cpu", num_hidden_layers=1, layer_types=["sliding_attention"], block_size=3)
    assert isinstance(rig.hello(), DraftReady)
    return rig


@pytest.mark.parametrize("msg", [FULL, EMPTY, DraftHello(3, "main", Epoch(2), 48, "bfloat16", ExchangeMap(1, 2, 3, 4))])
def test_requests_survive_the_wire(msg):
    assert decoder(SpecRequest).decode(encode(msg)) == msg


@pytest.mark.parametrize("msg", [Planned(7, 1.5, 6, 1.0, 2.0, 3.0, 4.0), DraftReady(1, 2, 8, [1, 5], True, 9)])
def test_replies_survive_the_wire(msg):
    assert decoder(SpecReply).decode(encode(msg)) == msg


def test_hello_says_that_plans_are_served_and_where_numbers_begin(rig):
    reply = rig.hello()
    assert (reply.plans, reply.number, reply.block_size) == (True, 0, 3)
    assert isinstance(rig.plan([], after=0), Planned)
    assert rig.hello().number == 1, "D is 1"
    rig.slots.words[0] = 40  # F
    assert rig.hello().number == 40


def test_a_later_target_finds_an_empty_stream_and_closed_slots(rig):
    rig.plan([], **rig.open(1, 5))
    session = rig.session
    assert isinstance(rig.hello(epoch=1), DraftReady)
    assert isinstance(rig.hello(epoch=2), DraftReady)
    assert rig.session is session, "graphs are kept: nothing has moved"
    assert session.lane.patience == [2.0, 0.0], "a target that lives has time to write F, a dead one has not"
    assert rig.acks == [1, 2]
    assert len(session.tables) == 0
    rig.worker.close()
    assert session.lane.patience[-1] == 2.0


def test_another_map_of_the_exchange_makes_another_session(rig):
    session = rig.session
    moved = msgspec.structs.replace(rig.map, num_rows=rig.map.num_rows - 1)
    assert isinstance(rig.hello(exchange=moved), DraftReady)
    assert rig.session is not session


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exchange": None}, "no map of the exchange"),
        ({"exchange": ExchangeMap(0, 10**6, 0, 1)}, "slots of"),
        ({"exchange": ExchangeMap(0, NUM_SLOTS, 0, 10**6)}, "1000000 rows of features"),
        ({"engine": "other"}, "engine 'other'"),
    ],
)
def test_a_greeting_that_does_not_fit_is_refused_with_the_numbers(rig, changes, reason):
    reply = rig.hello(**changes)
    assert isinstance(reply, BadRequest)
    assert reason in reply.reason


def test_words_that_nobody_has_zeroed_are_refused(rig):
    rig.slots.words[0] = -5
    assert "were not zeroed" in rig.hello().reason


def test_a_plan_waits_for_f_and_posts_its_number(rig):
    rig.slots.words[0] = 3
    rig.number = 11
    assert isinstance(rig.plan([], after=3), Planned)
    assert rig.session.lane.waits == [3]
    assert rig.session.lane.words() == (12, 3)


def test_plan_before_hello_and_propose_are_refused(tmp_path):
    rig = PlanRig(tmp_path, V2, "cpu", num_hidden_layers=1, layer_types=["sliding_attention"], block_size=3)
    assert "before DraftHello" in rig.plan([]).reason
    propose = Propose([], [], [], [], [], [], [], [], [], [], 0, [], [], [], [])
    assert "takes Plan" in rig.worker.handle(propose).reason


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"number": 2}, "plan 2 is not in (2,"),
        ({"after": -1}, "wait for -1"),
        ({"num_drafts": 3}, "num_drafts is 3, this draft gives at most 2"),
        ({"closes": [2]}, "close of slot 2, which is not open"),
        ({"closes": [1, 1]}, "close of slot 1, which is not open"),
        ({"opens": [SlotOpen(1, [])]}, "open of slot 1, which is open already"),
        ({"opens": [SlotOpen(NUM_SLOTS + 1, [])]}, f"outside [1, {NUM_SLOTS}]"),
        ({"opens": [SlotOpen(0, [])]}, f"outside [1, {NUM_SLOTS}]"),
        ({"opens": [SlotOpen(2, [1])]}, "page id 1 is outside"),
        ({"opens": [SlotOpen(2, [0] * 99)]}, "99 pages, a row holds"),
        ({"page_slots": [1]}, "page_slots, page_idxs, page_ids have [1, 0, 0] entries"),
        ({"page_slots": [1], "page_idxs": [99], "page_ids": [5]}, "page index 99 of slot 1"),
        ({"page_slots": [2], "page_idxs": [0], "page_ids": [5]}, "page of slot 2, which is not open"),
        ({"clear_pages": [0]}, "page id 0 is outside"),
        ({"write_slots": [1], "write_starts": [0], "write_lens": [2], "write_rows": [95]}, "in rows [95, 97)"),
        ({"write_slots": [1], "write_starts": [200], "write_lens": [1], "write_rows": [0]}, "need pages, none at"),
        ({"write_slots": [2], "write_starts": [0], "write_lens": [1], "write_rows": [0]}, "features of slot 2"),
        ({"members": [1, 1]}, "2 members, 1 slots"),
        ({"members": [2]}, "member slot 2 is not open"),
        ({"members": [1], "closes": [1]}, "member slot 1 is not open"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_changes_nothing(rig, columns, reason):
    rig.plan([], **rig.open(1, 5))
    rig.plan([])
    before = rig.arena.clone().numpy().tobytes(), rig.session.tables.host.table.clone().numpy().tobytes()
    reply = rig.worker.handle(msgspec.structs.replace(EMPTY, **({"number": 3} | columns)))
    assert isinstance(reply, BadRequest)
    assert reason in reply.reason
    after = rig.arena.numpy().tobytes(), rig.session.tables.host.table.numpy().tobytes()
    assert before == after
    assert isinstance(rig.plan([]), Planned)


def test_a_slot_that_is_closed_and_opened_in_one_plan_has_the_new_pages_alone(rig):
    rig.plan([], **rig.open(1, 5))
    rig.plan([], closes=[1], opens=[SlotOpen(1, [7, 8])], page_slots=[1, 1], page_idxs=[1, 2], page_ids=[9, 10])
    assert rig.session.tables.on_device[1, :4].tolist() == [7, 9, 10, 0]
    assert not rig.session.tables.on_device[0].any()


def test_cleared_pages_are_zero_before_features_come(rig):
    columns = merged(rig.open(1, 5))
    rig.plan([], clear_pages=[int(columns["opens"][0].pages[0]), 50], **columns)
    assert not rig.pool.k(0)[50].any()
    first = rig.pool.k(0)[int(columns["opens"][0].pages[0])]
    assert first.isfinite().all()
    assert first.any()
