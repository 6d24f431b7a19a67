"""What the supervisor decides, checked without processes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.policy import FRONT, MPS_RULES, Action, AllUp, DoWithout, GiveUp, Kill, Policy, Spawn, Stop, Tell
from memsvc.wire.control import PeerDown, PeerList, PeerSilent, PeerUp

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


@pytest.mark.parametrize("dead", ["target", "draft"])
def test_under_mps_a_dead_worker_takes_memory_service_and_peer_with_it(dead: str):
    policy = Policy(ALL, rules=MPS_RULES)
    policy.start()
    for role in ("memsvc", "draft", "tokenizer", "target", "front"):
        policy.on_ready(role)
    peer = "draft" if dead == "target" else "target"
    actions = policy.on_end(dead, "killed by SIGKILL", 0.0)
    assert {action.role for action in actions if isinstance(action, Stop)} == {peer, "memsvc"}
    assert spawned(actions) == []
    # They fail by themselves as well, and are not blamed for it.
    assert spawned(policy.on_end("memsvc", ENDED, 0.1)) == []
    assert policy.on_end(peer, ENDED, 0.1) == [Spawn("memsvc", 2)]
    assert spawned(policy.on_ready("memsvc")) == ["draft", "target"]
    assert not any(isinstance(action, Stop) for action in all_up().on_end(dead, "killed by SIGKILL", 0.0))


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
    roles = ["memsvc", "draft", "tokenizer", "target"]
    assert actions[1:] == [Tell(PeerList(generations=dict.fromkeys(roles, 1), up=roles, silent=[]))]
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


def test_the_front_hears_of_silence_and_of_its_end():
    policy = all_up()
    assert policy.on_silent("target") == [Tell(PeerSilent("target"))]
    assert policy.on_heard("target") == [Tell(PeerUp("target", 1))]
    assert policy.on_heard("target") == []
    assert policy.on_hang("target") == []
    assert policy.on_silent(FRONT) == policy.on_heard(FRONT) == []


def test_a_process_that_hangs_is_killed_and_starts_again_like_one_that_died():
    policy = all_up()
    for turn in range(2):
        policy.on_silent("target")
        assert policy.on_hang("target") == [Kill("target")]
        actions = policy.on_end("target", "killed by SIGKILL", turn * 20.0)
        assert actions == [Tell(PeerDown("target")), Spawn("target", turn + 2)]
        policy.on_ready("target")
    policy.on_silent("target")
    policy.on_hang("target")
    assert isinstance(policy.on_end("target", "killed by SIGKILL", 40.0)[0], GiveUp)


def test_who_may_be_waiting_for_a_process_that_hangs_is_neither_killed_nor_blamed_nor_started_before_it_is_back():
    policy = all_up()
    policy.on_silent("memsvc")
    policy.on_silent("target")
    assert policy.on_hang("target") == []
    for time in range(5):
        assert policy.on_end("target", ENDED, float(time)) == [Tell(PeerDown("target"))] or time
    assert policy.on_hang("memsvc") == [Kill("memsvc")]
    policy.on_end("memsvc", "killed by SIGKILL", 10.0)
    assert policy.on_end("draft", ENDED, 10.0) == [Spawn("memsvc", 2)]
    assert "target" in spawned(policy.on_ready("memsvc"))


def test_who_ended_while_another_was_silent_starts_when_that_one_is_heard_again():
    policy = all_up()
    policy.on_silent("memsvc")
    policy.on_end("draft", ENDED, 0.0)
    assert policy.on_heard("memsvc") == [Tell(PeerUp("memsvc", 1)), Spawn("draft", 2)]


def test_a_new_front_is_told_who_is_silent():
    policy = all_up()
    policy.on_silent("draft")
    roles = ["memsvc", "draft", "tokenizer", "target"]
    generations = dict.fromkeys(roles, 1)
    assert policy.on_end(FRONT, ENDED, 0.0)[1:] == [Tell(PeerList(generations, up=roles, silent=["draft"]))]
    policy.on_end("draft", ENDED, 0.0)
    generations["draft"] = 2
    up = [role for role in roles if role != "draft"]
    assert policy.on_end(FRONT, ENDED, 100.0)[1:] == [Tell(PeerList(generations, up=up, silent=[]))]
    policy.on_ready("draft")
    assert policy.on_end(FRONT, ENDED, 200.0)[1:] == [Tell(PeerList(generations, up=roles, silent=[]))]


def test_silence_of_a_process_that_is_ending_or_starting_means_nothing():
    policy = all_up()
    policy.on_end("memsvc", ENDED, 0.0)
    assert policy.on_silent("target") == policy.on_hang("target") == []
    assert policy.on_silent("memsvc") == []


class World:
    """The processes that a policy believes in, for real."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.running: dict[str, bool] = {}
        self.stopping: set[str] = set()
        self.silent: set[str] = set()
        self.killed: set[str] = set()
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
                case Tell(PeerList(generations, up, silent)):
                    assert generations.keys() == set(ALL) - {FRONT}
                    assert all(self.running[role] for role in up)
                    self.told = dict.fromkeys(generations, False) | dict.fromkeys(set(up) - set(silent), True)
                case Tell(PeerUp(role, _generation)):
                    assert self.running[role]
                    assert not self.told.get(role)
                    self.told[role] = True
                case Tell(PeerDown(role)):
                    self.told[role] = False
                case AllUp():
                    assert all(self.running.get(role) for role in ALL)
                case Tell(PeerSilent(role)):
                    assert self.told[role]
                    self.told[role] = False
                case Kill(role):
                    self.killed.add(role)
                case GiveUp(reason) | DoWithout(_, reason):
                    raise AssertionError(reason)

    def ready(self, role: str) -> None:
        self.running[role] = True
        self.do(self.policy.on_ready(role))

    def end(self, role: str) -> None:
        del self.running[role]
        self.stopping.discard(role)
        self.silent.discard(role)
        self.killed.discard(role)
        self.do(self.policy.on_end(role, ENDED, 0.0))

    def fall_silent(self, role: str) -> None:
        if self.running[role] and role not in self.stopping and role not in self.silent:
            self.silent.add(role)
            self.do(self.policy.on_silent(role))

    def speak_or_hang(self, role: str, *, hangs: bool) -> None:
        if role not in self.silent or role in self.stopping:
            return
        self.do(self.policy.on_hang(role) if hangs else self.policy.on_heard(role))
        if not hangs:
            self.silent.remove(role)


@given(st.integers(0, 1 << 30), st.integers(1, 60))
def test_whatever_dies_everything_serves_in_the_end(seed: int, num_events: int):
    chance = random.Random(seed)
    world = World(Policy(ALL, max_failures=1000))
    world.do(world.policy.start())
    for role in ("memsvc", "draft", "tokenizer", "target", "front"):
        world.ready(role)
    for _ in range(num_events):
        role = chance.choice(sorted(world.running))
        if chance.random() < 0.3:
            world.fall_silent(role)
        elif chance.random() < 0.3:
            world.speak_or_hang(role, hangs=chance.random() < 0.5)
        elif role in world.stopping or world.running[role] or chance.random() < 0.3:
            world.end(role)
        else:
            world.ready(role)
    while not all(world.running.get(role) for role in ALL) or world.stopping or world.silent:
        if world.stopping or world.killed:
            world.end(min(world.stopping | world.killed))
        elif world.silent:
            world.speak_or_hang(min(world.silent), hangs=True)
            if not world.killed:
                # It may be waiting for another one.
                world.speak_or_hang(max(world.silent), hangs=False)
        else:
            world.ready(next(role for role, is_ready in world.running.items() if not is_ready))
    assert {role for role, is_up in world.told.items() if is_up} == set(ALL) - {FRONT}


@pytest.mark.parametrize("roles", [ALL, ("memsvc", "target", "tokenizer", "front")])
def test_ready_of_a_process_that_is_not_starting_changes_nothing(roles: tuple[str, ...]):
    policy = all_up(roles)
    assert policy.on_ready("target") == []
