"""The target's view of a draft on the device: numbers, refusals, and a real process that dies or hangs."""

import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from memsvc.wire.base import BadRequest, Epoch
from memsvc.wire.spec import DraftHello, DraftReady, ExchangeMap, Plan, Planned
from target_worker import draft_peer
from target_worker.cuda.plan_link import PlanLink
from target_worker.draft_peer import DraftContract
from tests.support.scripted_rpc import ScriptedRpc

EMPTY = Plan(1, 0, [], [], [], [], [], [], [], [], [], [], [], 0)


class Handed:
    """The lane, of which only the hand-over matters."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def hand_over_without_peer(self, value: int, _voided: object) -> None:
        self.values.append(value)


class Rig:
    """A link whose draft is a sleeping process, with scripted replies."""

    def __init__(self) -> None:
        self.rpc, self.lane = ScriptedRpc(), Handed()
        contract = DraftContract("main", Epoch(1), 8, "float32", 4, (0, 1), ExchangeMap(0, 8, 256, 64))
        self.link = PlanLink(self.rpc, contract, self.lane, None)  # type: ignore[arg-type]
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def ready(self, **changes: object) -> DraftReady:
        ready = DraftReady(self.process.pid, 1, 4, [0, 1], plans=True, number=40)
        return msgspec.structs.replace(ready, **changes)

    def up(self) -> None:
        self.rpc.replies.append(self.ready())
        assert self.link.poll()

    def send(self, reply: object) -> bool:
        self.rpc.replies.append(reply)
        return self.link.send(msgspec.structs.replace(EMPTY, number=self.link.next_value()))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.process.kill()
    rig.process.wait()


def test_numbers_go_on_from_what_the_draft_found_in_the_words(rig: Rig) -> None:
    assert [rig.link.next_value(), rig.link.next_value()] == [1, 2]
    rig.up()
    (hello,) = rig.rpc.sent
    assert isinstance(hello, DraftHello)
    assert hello.exchange == ExchangeMap(0, 8, 256, 64)
    assert rig.send(Planned(41))
    assert isinstance(rig.rpc.sent[-1], Plan)
    assert rig.rpc.sent[-1].number == 41
    assert rig.link.take_awaited() == 41
    assert rig.link.take_awaited() == 0
    assert rig.link.answered()
    assert rig.lane.values == []


@pytest.mark.parametrize(
    "reply", [BadRequest("no"), {"block_size": 8}, {"target_layer_ids": [2]}, {"plans": False}, ValueError("x")]
)
def test_a_draft_of_another_shape_is_not_used(rig: Rig, reply: object) -> None:
    if isinstance(reply, ValueError):
        reply = msgspec.DecodeError("x")
    rig.rpc.replies.append(rig.ready(**reply) if isinstance(reply, dict) else reply)
    assert not rig.link.poll()
    assert not rig.link.is_up
    assert rig.lane.values == []


@pytest.mark.parametrize("reply", [BadRequest("no"), msgspec.DecodeError("x")])
def test_a_refused_plan_is_replaced_by_the_host_once_it_is_asked_for(rig: Rig, reply: object) -> None:
    rig.up()
    assert rig.send(reply)
    assert rig.link.take_awaited() == 41
    assert not rig.link.answered()
    assert not rig.link.is_up
    assert rig.lane.values == [41]
    assert rig.link.next_value() == 42


def test_a_dead_draft_is_noticed_and_a_new_one_greeted_at_once(rig: Rig) -> None:
    rig.up()
    assert rig.send(Planned(41))
    rig.link.check()
    assert rig.link.is_up
    rig.process.kill()
    rig.process.wait()
    rig.link.check()
    assert not rig.link.is_up
    assert rig.link.awaited == 0
    assert rig.lane.values == [41]
    rig.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    rig.rpc.replies.clear()
    rig.up()
    assert rig.link.next_value() == 42


def test_a_draft_that_dies_before_it_answers_is_not_waited_for(rig: Rig) -> None:
    rig.up()
    assert rig.link.send(msgspec.structs.replace(EMPTY, number=rig.link.next_value()))
    rig.process.kill()
    rig.process.wait()
    assert not rig.link.answered()
    assert rig.lane.values == [41]


def test_a_draft_that_answers_nothing_is_killed_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []
    rig.link.on_wait = lambda: beats.append(1)
    monkeypatch.setattr(draft_peer, "HANG_S", 0.02)
    rig.up()
    assert rig.link.send(msgspec.structs.replace(EMPTY, number=rig.link.next_value()))
    assert not rig.link.answered()
    assert beats
    assert rig.process.wait() < 0
    assert rig.lane.values == [41]


def test_a_draft_that_is_given_up_is_killed_first(rig: Rig) -> None:
    rig.up()
    rig.link.give_up()
    assert rig.process.wait() < 0
    assert not rig.link.is_up
    assert rig.lane.values == [40]
