"""Nobody waits for ever: random loads on pools far too small for them, run by engines that obey."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import Pin, Unpin
from memsvc.wire.base import Epoch, pack_tokens
from memsvc.wire.mem import KindSpec, NoRoom, Stepped
from tests.support import hypothesis_profiles
from tests.support.mem_builders import (
    DRAFT,
    RECURRENT,
    RING,
    STATE,
    TARGET,
    Clock,
    Engine,
    check,
    make_config,
    stats_of,
    windowed,
)
from tests.support.mem_memory import Memory, Published
from tests.support.mem_worker import CHUNK, Worker, make_jobs

PROFILE = hypothesis_profiles.load()
RECURRENT_WINDOWED = (TARGET, windowed(DRAFT, 4), STATE, RING)


@dataclass(kw_only=True)
class Load:
    """What happens beside the engines' own work, and what the engines are."""

    num_engines: int = 1
    at_once: bool = False
    """Victims are closed at once, and the rest of the reservation must fit then."""
    patience: bool = False
    """At times everything that a refused reservation is said to wait for is brought about: it must fit then."""
    pins: bool = False
    kills: int = 0
    """Times that each engine's process is replaced by another."""
    plain: tuple[int, ...] = ()
    """Engines of another model, without recurrent state."""
    config: dict[str, Any] = field(default_factory=dict)


class Run:
    """One load from begin to end."""

    def __init__(self, seed: int, num_frames: int, kinds: list[KindSpec], load: Load) -> None:
        self.dice, self.load = Random(seed), load
        config = make_config(num_frames, kinds, retract_ms=100_000, **load.config)
        self.manager = MemoryManager(config, clock=Clock())
        memory = Memory([kind.pages_per_frame for kind in self.manager.layout.kinds])
        published, names = Published(), tuple(kind.name for kind in kinds)
        self.workers: list[Worker] = []
        self.dying: list[tuple[Worker, Epoch]] = []
        self.drafts: list[Engine] = []
        self.texts: list[list[int]] = []
        for index in range(load.num_engines):
            model, own = ("plain", names[:2]) if index in load.plain else ("model", names)
            worker = Worker(self.manager, name=f"e{index}", pid=index + 1, kinds=own, fingerprint=model)
            worker.setup(memory, published, max(kind.window for kind in kinds))
            worker.at_once = load.at_once
            jobs = make_jobs(self.dice, 1 + 100 * index, self.dice.randint(2, 6), longest=14)
            self.texts += [job.tokens for job in jobs]
            worker.begin(self.dice, jobs)
            self.workers.append(worker)
            if load.kills:
                self.drafts.append(Engine(self.manager, f"e{index}", "draft", ("draft_kv",), model, pid=1000 + index))

    def to_the_end(self) -> list[Worker]:
        """Fails if there is none."""
        turns = 0
        while any(worker.busy for worker in self.workers):
            worker = self.dice.choice(self.workers)
            reply = worker.turn()
            self.look_at(worker, reply)
            if reply.no_room is not None and not reply.no_room.victims and self.load.patience:
                self.bring_about(worker)
            self.interfere()
            check(self.manager)
            turns += 1
            assert turns < 2000 * len(self.workers), f"no end in sight: {[(w.waiting, w.jobs) for w in self.workers]}"
        for worker in self.workers:
            worker.leave()
        check(self.manager)
        return self.workers

    def look_at(self, worker: Worker, reply: Stepped) -> None:
        """A refusal names its reason, and the elder only when it is alone."""
        assert isinstance(reply.open_no_room, NoRoom | None)
        stats = stats_of(self.manager)
        if reply.no_room is None or stats.elder not in reply.no_room.victims or stats.elder not in worker.reqs:
            return
        assert reply.no_room.victims == [stats.elder], "the elder gives way only when it is alone"
        assert stats.num_reqs == 1
        worker.num_last_rung += 1

    def interfere(self) -> None:
        """Operators pin and unpin, processes die and are reaped."""
        dice, load = self.dice, self.load
        if load.pins and dice.random() < 0.2:
            text = dice.choice([*self.texts, *(req.tokens for worker in self.workers for req in worker.reqs.values())])
            name = dice.choice("ab")
            verb = Pin(name=name, tokens=pack_tokens(text), ttl_s=1.0) if dice.random() < 0.6 else Unpin(name=name)
            self.manager.handle_admin(verb)
        worker = dice.choice(self.workers)
        if worker.num_killed < load.kills and dice.random() < 0.03:
            self.dying.append((worker, worker.die()))
        if self.dying and dice.random() < 0.1:
            self.bury()

    def bury(self) -> None:
        """Dead processes are gone, and their drafts have dropped what they knew of them."""
        for worker, epoch in self.dying:
            self.manager.client_exited(epoch)
            worker.reaped()
        self.dying = []
        for worker, draft in zip(self.workers, self.drafts, strict=False):
            draft.acknowledge(worker.epoch)

    def bring_about(self, worker: Worker) -> None:
        """Limbo and quarantine drain, and others give back what they are asked for: then it must fit."""
        self.bury()
        for other in self.workers:
            other.give_back(other.give_back([]))
        worker.ask_again()


def run_load(seed: int, num_frames: int, kinds: list[KindSpec] | tuple[KindSpec, ...], **load: Any) -> list[Worker]:
    """Run a load to its end, engines in random turn; fails if it does not end."""
    return Run(seed, num_frames, list(kinds), Load(**load)).to_the_end()


seeds = st.integers(0, 2**32)
one_or_two = st.integers(1, 2)
QUOTAS: dict[str, Any] = {"engine_quota_frames": {"e0": 8}, "salt_quota_frames": {"s": 7}}


@PROFILE
@given(seed=seeds, num_frames=st.integers(8, 14))
def test_every_request_of_one_engine_completes(seed: int, num_frames: int) -> None:
    run_load(seed, num_frames, [TARGET, DRAFT])


@PROFILE
@given(seed=seeds, num_engines=st.integers(2, 3), num_frames=st.integers(8, 14))
def test_every_request_of_several_engines_completes(seed: int, num_engines: int, num_frames: int) -> None:
    run_load(seed, num_frames, [TARGET, DRAFT], num_engines=num_engines)


@PROFILE
@given(seed=seeds, num_engines=one_or_two, num_frames=st.integers(8, 14))
def test_every_request_with_a_window_completes(seed: int, num_engines: int, num_frames: int) -> None:
    config = {"max_extend_tokens": CHUNK}
    run_load(seed, num_frames, [TARGET, windowed(DRAFT, 4)], num_engines=num_engines, config=config)


@PROFILE
@given(seed=seeds, num_frames=st.integers(10, 16))
def test_every_request_within_quotas_completes(seed: int, num_frames: int) -> None:
    run_load(seed, num_frames, [TARGET, DRAFT], num_engines=2, config={"low_watermark": 0.05, **QUOTAS})


@PROFILE
@given(seed=seeds, num_frames=st.integers(8, 12), window=st.booleans())
def test_victims_are_enough_for_the_rest_of_the_reservation(seed: int, num_frames: int, window: bool) -> None:
    draft, bound = (windowed(DRAFT, 4), CHUNK) if window else (DRAFT, 0)
    run_load(seed, num_frames, [TARGET, draft], at_once=True, config={"max_extend_tokens": bound})


@PROFILE
@given(seed=seeds, num_engines=one_or_two, num_frames=st.integers(12, 20))
def test_every_request_with_recurrent_state_completes(seed: int, num_engines: int, num_frames: int) -> None:
    run_load(seed, num_frames, RECURRENT, num_engines=num_engines)


@PROFILE
@given(seed=seeds, num_frames=st.integers(12, 20), window=st.booleans())
def test_victims_with_states_are_enough_for_the_rest_of_the_reservation(
    seed: int, num_frames: int, window: bool
) -> None:
    kinds, bound = (RECURRENT_WINDOWED, CHUNK) if window else (RECURRENT, 0)
    run_load(seed, num_frames, kinds, at_once=True, config={"max_extend_tokens": bound})


@PROFILE
@given(seed=seeds, num_engines=st.integers(1, 3), num_frames=st.integers(14, 20))
def test_what_a_refused_reservation_waits_for_is_enough(seed: int, num_engines: int, num_frames: int) -> None:
    run_load(seed, num_frames, RECURRENT, num_engines=num_engines, patience=True)


@PROFILE
@given(seed=seeds, num_frames=st.integers(20, 28), patience=st.booleans(), quotas=st.booleans())
def test_pins_quotas_and_quarantine_stop_nobody_for_ever(
    seed: int, num_frames: int, patience: bool, quotas: bool
) -> None:
    limits = {"engine_quota_frames": {"e0": 14}, "salt_quota_frames": {"s": 13}} if quotas else {}
    config = {"pin_budget_frames": 6, "max_extend_tokens": CHUNK, "checkpoint_interval": 4, **limits}
    run_load(seed, num_frames, RECURRENT_WINDOWED, num_engines=2, pins=True, kills=2, patience=patience, config=config)


@PROFILE
@given(seed=seeds, num_frames=st.integers(14, 22), kills=st.integers(0, 1))
def test_a_recurrent_model_and_another_beside_it_complete(seed: int, num_frames: int, kills: int) -> None:
    run_load(seed, num_frames, RECURRENT, num_engines=2, plain=(1,), kills=kills, patience=True)
