"""What the supervisor decides, checked without processes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.policy import FRONT, Action, AllUp, DoWithout, GiveUp, Policy, Spawn, Stop, Tell
from memsvc.wire.control import PeerDown, PeerUp

ALL = ("memsvc", "draft", "target", "tokenizer", "front")
ENDED = "ended with status 1"


def spawned(actions: list[Action]) -> list[str]:
    return [action.role for action in actions if isinstance(action, Spawn)]


def all_up(roles: tuple[str, ...] = ALL) -> Policy:
    policy = Policy(roles)
    policy.start()
    for role in ("memsvc", "draft", "tokenizer", "target", "front"):
        if role in roles:
            policy.on_ready(role)
    return policy


def test_each_process_starts_when_what_it_needs_serves():
    policy = Policy(ALL)
    assert spawned(policy.start()) == ["memsvc"]
    assert spawned(policy.on_ready("memsvc")) == ["draft", "tokenizer", "target", "front"]
    assert policy.on_ready("tokenizer") == [Tell(PeerUp("tokenizer", 1))]
    assert policy.on_ready("draft") == [Tell(PeerUp("draft", 1))]
    assert policy.on_ready("front") == []
    assert policy.on_ready("target") == [Tell(PeerUp("target", 1)), AllUp(is_first=True)]


def test_a_run_without_a_draft_has_none():
    policy = Policy(("memsvc", "target", "tokenizer", "front"))
    policy.start()
    assert "draft" not in spawned(policy.on_ready("memsvc"))
    assert policy.on_end("memsvc", ENDED, 0.0)[:2] == [Tell(PeerDown("memsvc")), Tell(PeerDown("target"))]


def test_a_dead_memory_service_starts_again_only_after_its_workers_have_ended():
    policy = all_up()
    actions = policy.on_end("memsvc", ENDED, 0.0)
    assert [action for action in actions if isinstance(action, Stop)] == [Stop("draft"), Stop("target")]
    assert spawned(actions) == []
    assert spawned(policy.on_end("draft", ENDED, 0.1)) == []
    assert policy.on_end("target", ENDED, 0.2) == [Spawn("memsvc", 2)]
    assert spawned(policy.on_ready("memsvc")) == ["draft", "target"]
    policy.on_ready("draft")
    assert policy.on_ready("target")[-1] == AllUp(is_first=False)


def test_workers_that_were_stopped_for_the_memory_service_are_not_blamed():
    policy = all_up()
    for _ in range(2):
        for role in ("memsvc", "draft", "target"):
            policy.on_end(role, ENDED, 0.0)
        for role in ("memsvc", "draft", "target"):
            policy.on_ready(role)
    assert spawned(policy.on_end("target", ENDED, 0.0)) == ["target"]


def test_the_third_failure_in_the_window_is_the_last():
    policy = all_up()
    for _ in range(2):
        assert spawned(policy.on_end("tokenizer", ENDED, 10.0)) == ["tokenizer"]
        policy.on_ready("tokenizer")
    (give_up,) = policy.on_end("tokenizer", ENDED, 69.0)
    assert isinstance(give_up, GiveUp)
    assert give_up.reason == "tokenizer: ended with status 1, for the 3. time within 60 s"


def test_old_failures_are_forgiven():
    policy = all_up()
    for turn in range(10):
        assert spawned(policy.on_end("tokenizer", ENDED, turn * 31.0)) == ["tokenizer"]
        policy.on_ready("tokenizer")


def test_a_new_front_is_told_everything_and_nobody_is_told_about_the_front():
    policy = all_up()
    actions = policy.on_end(FRONT, ENDED, 0.0)
    assert actions[0] == Spawn(FRONT, 2)
    assert actions[1:] == [Tell(PeerUp(role, 1)) for role in ("memsvc", "draft", "tokenizer", "target")]
    assert policy.on_ready(FRONT) == [AllUp(is_first=False)]


def test_fatal_and_late_processes_end_the_run():
    policy = Policy(ALL)
    policy.start()
    assert policy.on_late("memsvc", 1, 5.0) == [GiveUp("memsvc: not ready after 5 s")]
    policy.on_ready("memsvc")
    assert policy.on_late("memsvc", 1, 5.0) == []
    assert policy.on_fatal("draft", "no such folder") == [GiveUp("draft: no such folder")]


def test_a_failure_before_the_first_ready_ends_the_run():
    policy = Policy(ALL)
    policy.start()
    assert policy.on_end("memsvc", ENDED, 0.0) == [GiveUp("memsvc: ended with status 1 before it was ready")]


def test_a_draft_that_keeps_failing_is_left_away_and_the_rest_goes_on():
    policy = all_up()
    for _ in range(2):
        assert spawned(policy.on_end("draft", ENDED, 10.0)) == ["draft"]
        policy.on_ready("draft")
    assert policy.on_end("draft", ENDED, 69.0) == [
        Tell(PeerDown("draft")),
        DoWithout("draft", "draft: ended with status 1, for the 3. time within 60 s"),
        AllUp(is_first=False, without=("draft",)),
    ]
    policy.on_end("memsvc", ENDED, 70.0)
    assert spawned(policy.on_end("target", ENDED, 70.0)) == ["memsvc"]
    assert spawned(policy.on_ready("memsvc")) == ["target"]
    assert policy.on_ready("target")[-1] == AllUp(is_first=False, without=("draft",))


def test_a_draft_that_fails_before_it_was_ever_ready_does_not_end_the_run():
    policy = Policy(ALL)
    policy.start()
    policy.on_ready("memsvc")
    actions = policy.on_end("draft", ENDED, 0.0)
    assert actions == [
        Tell(PeerDown("draft")),
        DoWithout("draft", "draft: ended with status 1 before it was ready"),
    ]
    for role in ("tokenizer", FRONT):
        policy.on_ready(role)
    assert policy.on_ready("target")[-1] == AllUp(is_first=True, without=("draft",))


def test_a_late_draft_is_stopped_and_left_away():
    policy = Policy(ALL)
    policy.start()
    policy.on_ready("memsvc")
    assert policy.on_late("draft", 1, 5.0) == [
        DoWithout("draft", "draft: not ready after 5 s"),
        Tell(PeerDown("draft")),
        Stop("draft"),
    ]
    assert policy.on_ready("draft") == policy.on_end("draft", ENDED, 6.0) == []


def test_a_fatal_draft_ends_the_run_only_if_it_never_served():
    policy = all_up()
    assert policy.on_fatal("draft", "odd")[0] == DoWithout("draft", "draft: odd")
    assert policy.on_end("draft", ENDED, 0.0) == []
    policy = Policy(ALL)
    policy.start()
    policy.on_ready("memsvc")
    assert policy.on_fatal("draft", "odd") == [GiveUp("draft: odd")]


class World:
    """The processes that a policy believes in, for real."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.running: dict[str, bool] = {}
        self.stopping: set[str] = set()
        self.told: dict[str, bool] = {}

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Spawn(role, _generation):
                    assert role not in self.running, f"{role} started twice"
                    if role == "memsvc":
                        assert not {"draft", "target"} & self.running.keys()
                    self.running[role] = False
                    if role == FRONT:
                        self.told = {}
                case Stop(role):
                    assert role in self.running
                    self.stopping.add(role)
                case Tell(PeerUp(role, _generation)):
                    assert self.running[role]
                    assert not self.told.get(role)
                    self.told[role] = True
                case Tell(PeerDown(role)):
                    self.told[role] = False
                case AllUp():
                    assert all(self.running.get(role) for role in ALL)
                case GiveUp(reason) | DoWithout(_, reason):
                    raise AssertionError(reason)

    def ready(self, role: str) -> None:
        self.running[role] = True
        self.do(self.policy.on_ready(role))

    def end(self, role: str) -> None:
        del self.running[role]
        self.stopping.discard(role)
        self.do(self.policy.on_end(role, ENDED, 0.0))


@given(st.integers(0, 1 << 30), st.integers(1, 60))
def test_whatever_dies_everything_serves_in_the_end(seed: int, num_events: int):
    chance = random.Random(seed)
    world = World(Policy(ALL, max_failures=1000))
    world.do(world.policy.start())
    for role in ("memsvc", "draft", "tokenizer", "target", "front"):
        world.ready(role)
    for _ in range(num_events):
        role = chance.choice(sorted(world.running))
        if role in world.stopping or world.running[role] or chance.random() < 0.3:
            world.end(role)
        else:
            world.ready(role)
    while not all(world.running.get(role) for role in ALL) or world.stopping:
        if world.stopping:
            world.end(min(world.stopping))
        else:
            world.ready(next(role for role, is_ready in world.running.items() if not is_ready))
    assert {role for role, is_up in world.told.items() if is_up} == set(ALL) - {FRONT}


@pytest.mark.parametrize("roles", [ALL, ("memsvc", "target", "tokenizer", "front")])
def test_ready_of_a_process_that_is_not_starting_changes_nothing(roles: tuple[str, ...]):
    policy = all_up(roles)
    assert policy.on_ready("target") == []
