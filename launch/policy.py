"""What to do when a process gets ready or ends. No processes here: events in, actions out."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from memsvc.wire.control import PeerDown, PeerList, PeerSilent, PeerUp, ToFront

FRONT = "front"


class Phase(Enum):
    """Where a process is in its life."""

    ABSENT = auto()
    STARTING = auto()
    UP = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class Rule:
    """needs: roles that must serve before it is started. waits_for_end: roles that must be gone before.

    takes_down: roles that are stopped when it ends, because they can't go on without it. is_optional: the
    server goes on without it when it keeps failing.
    """

    needs: tuple[str, ...] = ()
    waits_for_end: tuple[str, ...] = ()
    takes_down: tuple[str, ...] = ()
    is_optional: bool = False


RULES = {
    # The arena dies with the memory service, and whoever maps the old one must let go of it.
    "memsvc": Rule(waits_for_end=("draft", "target"), takes_down=("draft", "target")),
    "draft": Rule(needs=("memsvc",), is_optional=True),
    "tokenizer": Rule(needs=("memsvc",)),
    # It decodes without drafts until the draft worker has come, so the two load side by side.
    "target": Rule(needs=("memsvc",)),
    # It listens early, so that health checks see a server that is starting.
    FRONT: Rule(needs=("memsvc",)),
}
"""In the order of starting."""
MPS_RULES = RULES | {
    # Under MPS a client that dies takes the others with it, the owner of the memory too.
    "draft": replace(RULES["draft"], takes_down=("target", "memsvc")),
    "target": replace(RULES["target"], takes_down=("draft", "memsvc")),
}
"""The same for a server with --mps on."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process; generation counts its starts."""

    role: str
    generation: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End a process that runs."""

    role: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a process that hangs, as it does nothing of its own any more."""

    role: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the front."""

    msg: ToFront


@dataclass(frozen=True, slots=True)
class AllUp:
    """Every process serves but those in without; is_first is False after a recovery."""

    is_first: bool
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DoWithout:
    """An optional process is not started any more; reason is the one line that says why."""

    role: str
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop everything; reason is the one line that says why."""

    reason: str


Action = Spawn | Stop | Kill | Tell | AllUp | DoWithout | GiveUp


class Policy:
    """State of all processes of one run. Every method returns what has to be done next, in order."""

    def __init__(
        self,
        roles: tuple[str, ...],
        max_failures: int = 3,
        window_s: float = 60.0,
        rules: Mapping[str, Rule] = RULES,
    ) -> None:
        self._rules = {role: _within(rule, roles) for role, rule in rules.items() if role in roles}
        self._max_failures = max_failures
        self._window_s = window_s
        self._phases = dict.fromkeys(self._rules, Phase.ABSENT)
        self._generations = dict.fromkeys(self._rules, 0)
        self._failures: dict[str, deque[float]] = {role: deque() for role in self._rules}
        self._was_ready: set[str] = set()
        self._was_all_up = False
        self._dropped: set[str] = set()
        """Optional roles that are not started again."""
        self._silent: set[str] = set()
        """Roles that are up and give no sign of life."""

    def start(self) -> list[Action]:
        """The first actions."""
        return self._spawn_what_can()

    def on_ready(self, role: str) -> list[Action]:
        """role says that it serves."""
        if self._phases[role] is not Phase.STARTING:
            return []
        self._phases[role] = Phase.UP
        self._was_ready.add(role)
        actions: list[Action] = []
        if role != FRONT:
            actions.append(Tell(PeerUp(role, self._generations[role])))
        actions += self._spawn_what_can()
        return actions + self._all_up()

    def on_end(self, role: str, how: str, now: float) -> list[Action]:
        """The process of role has ended. how says it for people, now is a monotonic time."""
        phase = self._phases[role]
        self._phases[role] = Phase.ABSENT
        self._silent.discard(role)
        actions: list[Action] = []
        if phase is not Phase.STOPPING:
            # Who gave up waiting for a process that hangs has not failed, and is started when that one is back.
            reason = "" if self._silent_needs(role) else self._count_failure(role, how, now)
            if reason and not self._rules[role].is_optional:
                return [GiveUp(reason)]
            actions += self._gone(role)
            if reason:
                actions += self._drop(role, reason)
        return actions + self._spawn_what_can()

    def on_fatal(self, role: str, message: str) -> list[Action]:
        """The process itself says that starting it again would not help.

        One that never served ends the run even if it is optional: the user asked for it with a wrong folder or flag.
        """
        reason = f"{role}: {message}"
        if self._rules[role].is_optional and role in self._was_ready:
            return self._drop(role, reason)
        return [GiveUp(reason)]

    def on_late(self, role: str, generation: int, limit_s: float) -> list[Action]:
        """A process should have been ready by now."""
        if self._phases[role] is not Phase.STARTING or self._generations[role] != generation:
            return []
        reason = f"{role}: not ready after {limit_s:g} s"
        return self._drop(role, reason) if self._rules[role].is_optional else [GiveUp(reason)]

    def on_silent(self, role: str) -> list[Action]:
        """The process of role has given no sign of life for some seconds."""
        if self._phases[role] is not Phase.UP:
            return []
        self._silent.add(role)
        return [Tell(PeerSilent(role))] if role != FRONT else []

    def on_heard(self, role: str) -> list[Action]:
        """A process that was silent gives a sign of life."""
        if role not in self._silent:
            return []
        self._silent.remove(role)
        actions: list[Action] = [Tell(PeerUp(role, self._generations[role]))] if role != FRONT else []
        return actions + self._spawn_what_can()

    def on_hang(self, role: str) -> list[Action]:
        """The process of role has been silent for so long that it never will speak again. May be called repeatedly."""
        if role not in self._silent or self._silent_needs(role):
            return []
        return [Kill(role)]

    def _silent_needs(self, role: str) -> bool:
        """Whether role may be waiting for a process that hangs."""
        return not self._silent.isdisjoint(self._rules[role].needs)

    def _drop(self, role: str, reason: str) -> list[Action]:
        """Go on without an optional role."""
        self._dropped.add(role)
        actions: list[Action] = [DoWithout(role, reason)]
        if self._phases[role] in (Phase.STARTING, Phase.UP):
            self._set_stopping(role)
            actions += [Tell(PeerDown(role)), Stop(role)]
        return actions + self._all_up()

    def _set_stopping(self, role: str) -> None:
        self._phases[role] = Phase.STOPPING
        self._silent.discard(role)

    def _all_up(self) -> list[Action]:
        if any(phase is not Phase.UP for role, phase in self._phases.items() if role not in self._dropped):
            return []
        is_first, self._was_all_up = not self._was_all_up, True
        return [AllUp(is_first, tuple(sorted(self._dropped)))]

    def _gone(self, role: str) -> list[Action]:
        actions: list[Action] = [Tell(PeerDown(role))] if role != FRONT else []
        for dependent in self._rules[role].takes_down:
            if self._phases[dependent] in (Phase.STARTING, Phase.UP):
                self._set_stopping(dependent)
                actions += [Tell(PeerDown(dependent)), Stop(dependent)]
        return actions

    def _count_failure(self, role: str, how: str, now: float) -> str:
        """A reason to start it no more, or empty."""
        if role not in self._was_ready:
            return f"{role}: {how} before it was ready"
        times = self._failures[role]
        times.append(now)
        while now - times[0] > self._window_s:
            times.popleft()
        if len(times) < self._max_failures:
            return ""
        return f"{role}: {how}, for the {len(times)}. time within {self._window_s:g} s"

    def _spawn_what_can(self) -> list[Action]:
        actions: list[Action] = []
        for role, rule in self._rules.items():
            can = self._phases[role] is Phase.ABSENT and role not in self._dropped
            can = can and all(self._phases[needed] is Phase.UP for needed in rule.needs)
            can = can and not self._silent_needs(role)
            if can and all(self._phases[other] is Phase.ABSENT for other in rule.waits_for_end):
                self._phases[role] = Phase.STARTING
                self._generations[role] += 1
                actions.append(Spawn(role, self._generations[role]))
                if role == FRONT:
                    actions.append(Tell(self._peer_list()))
        return actions

    def _peer_list(self) -> PeerList:
        up = [role for role, phase in self._phases.items() if phase is Phase.UP and role != FRONT]
        return PeerList(
            generations={role: num for role, num in self._generations.items() if role != FRONT},
            up=up,
            silent=[role for role in up if role in self._silent],
        )


def _within(rule: Rule, roles: tuple[str, ...]) -> Rule:
    """The rule without roles that this run does not have."""
    needs, waits_for_end, takes_down = (
        tuple(role for role in names if role in roles) for names in (rule.needs, rule.waits_for_end, rule.takes_down)
    )
    return Rule(needs, waits_for_end, takes_down, rule.is_optional)
