"""The state machine of random engines: every exit path of a request is a rule, check() runs after every step."""

from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import Evict, Evicted, Flush, GetStats, Match, Matched, Pin, Stats, Unpin
from memsvc.wire.base import BadRequest, pack_tokens
from memsvc.wire.mem import (
    Fenced,
    KindSpec,
    Opened,
    OpenReq,
    Step,
    Stepped,
    TooLarge,
)
from tests.support.mem_builders import DRAFT, TARGET, Clock, Engine, check, make_config
from tests.support.mem_dice import Rolls
from tests.support.mem_memory import Memory, Published
from tests.support.mem_model import ModelEngine

tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=14)
seeds = st.integers(0, 2**32)
indices = st.integers(0, 1)


class Pool(RuleBasedStateMachine):
    """One engine, two kinds, no window."""

    num_engines = 1
    num_frames = 11
    kinds: tuple[KindSpec, ...] = (TARGET, DRAFT)
    window = 0
    config: ClassVar[dict[str, Any]] = {}
    pin_budget = 1
    lagging = True
    engine_kinds: ClassVar[list[tuple[str, ...]]] = [("target_kv", "draft_kv")]
    models: ClassVar[list[str]] = ["model"]
    """Of each engine, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        config = make_config(self.num_frames, list(self.kinds), pin_budget_frames=self.pin_budget, **self.config)
        self.manager = MemoryManager(config, clock=self.clock)
        self.memory = Memory([kind.pages_per_frame for kind in self.manager.layout.kinds])
        self.published = Published(config.checkpoint_interval // config.page_size or 8)
        self.engines: list[ModelEngine] = []
        self.num_steps = 0
        self.rolls = Rolls(self.config.get("max_extend_tokens", 12), self.lagging)
        self.lossless = True
        self.drafts: dict[str, Engine] = {}

    @initialize()
    def start(self) -> None:
        for index in range(self.num_engines):
            kinds = self.engine_kinds[index % len(self.engine_kinds)]
            model = self.models[index % len(self.models)]
            engine = ModelEngine(self.manager, f"e{index}", kinds=kinds, pid=index + 1, fingerprint=model)
            engine.setup(self.memory, self.published, self.window)
            self.engines.append(engine)
            engine.peers = self.engines

    # --- steps ---

    @rule(seed=seeds, times=st.integers(1, 12))
    def steps(self, seed: int, times: int) -> None:
        dice = Random(seed)
        for _ in range(times):
            self.step(dice)
            check(self.manager)

    def step(self, dice: Random) -> None:
        self.num_steps += 1
        engine = dice.choice(self.engines)
        parts: dict[str, Any] = {}
        opens = self.rolls.step(dice, engine, parts)
        engine.done = dice.randint(max(engine.done, engine.num - 2), engine.num)
        engine.scribble()
        reply = engine.step(done_step=engine.done, **parts)
        engine.take(reply)
        self.check_opens(engine, opens, reply)
        self.check_no_room(engine, reply)
        engine.launch(reply)
        if reply.no_room is not None and dice.random() < 0.8:
            engine.retract += reply.no_room.victims
        if dice.random() < 0.1:
            self.repeat(engine, parts, reply)

    # --- what must hold of replies ---

    def check_opens(self, engine: ModelEngine, opens: list[OpenReq], reply: Stepped) -> None:
        if reply.no_room is not None:
            assert not reply.opened
            assert reply.open_no_room is None
        for op, answer in zip(opens, reply.opened, strict=False):
            assert answer.rid == op.rid
            tokens = list(memoryview(op.tokens).cast("i"))
            limit = len(tokens) + op.max_new + 4
            if isinstance(answer, TooLarge):
                assert answer.frames_needed > answer.frames_usable
                continue
            assert isinstance(answer, Opened)
            self.check_hit(engine, op, tokens, answer)
            engine.opened(answer, tokens, limit, op.salt)
        tried = len(reply.opened) + (reply.open_no_room is not None)
        assert reply.no_room is not None or tried == len(opens) or reply.open_no_room is not None
        if reply.open_no_room is not None:
            assert self.running() or self.returning(), "an empty pool always opens"

    def check_hit(self, engine: ModelEngine, op: OpenReq, tokens: list[int], answer: Opened) -> None:
        expected, space = self.published.hit(engine.fingerprint, op.salt, tokens), (engine.fingerprint, op.salt)
        assert answer.prefix_len <= expected
        for length in answer.checkpoint_at:
            assert answer.prefix_len < length < len(tokens)
        if engine.states:
            known = self.published.frozen.ever.get(space, set())
            assert not answer.prefix_len or tuple(tokens[: answer.prefix_len]) in known
            assert not self.is_exact() or not answer.prefix_len < expected or expected in answer.checkpoint_at
            expected = self.published.frozen.hit(space, tokens, expected)
        else:
            assert answer.checkpoint_at == []
        if not self.is_exact():
            return
        assert answer.prefix_len == expected
        valid_from = self.published.valid_from(engine.fingerprint, op.salt, tokens, expected, self.window)
        assert answer.draft_valid_from == valid_from

    def check_no_room(self, engine: ModelEngine, reply: Stepped) -> None:
        if reply.no_room is None:
            return
        victims = reply.no_room.victims
        assert set(victims) <= set(engine.reqs)
        elder = self.stats().elder
        owner = [e for e in self.engines if elder in e.reqs]
        if owner and owner[0] is engine and elder in victims:
            assert victims == [elder]
            assert self.running() == 1
        assert victims or reply.no_room.waiting_on

    def repeat(self, engine: ModelEngine, parts: dict[str, Any], reply: Stepped) -> None:
        again = self.manager.handle(Step(epoch=engine.epoch, num=engine.num, done_step=engine.done, **parts))
        assert again == reply
        gap = self.manager.handle(Step(epoch=engine.epoch, num=engine.num + 2, done_step=engine.done))
        assert isinstance(gap, BadRequest)

    def stats(self) -> Stats:
        stats = self.manager.handle_admin(GetStats())
        assert isinstance(stats, Stats)
        return stats

    def is_exact(self) -> bool:
        """Whether nothing was ever evicted, so that hits must be what the model says; thinning is no eviction."""
        stats = self.stats()
        thinned = [stats.num_thinned * kind.pages_per_req * kind.is_state for kind in self.kinds]
        return self.lossless and stats.evicted_pages == thinned

    def running(self) -> int:
        return sum(len(engine.reqs) for engine in self.engines)

    def returning(self) -> int:
        return sum(kind.num_limbo + kind.num_quarantine for kind in self.stats().kinds)

    # --- the ways out ---

    @rule(index=indices, how=st.sampled_from(["exit", "register", "leave"]))
    @precondition(lambda self: self.num_steps > 20)
    def lose_engine(self, index: int, how: str) -> None:
        self.num_steps = 0
        engine = self.engines[index % self.num_engines]
        old = engine.epoch
        engine.reqs.clear()
        if how == "exit":
            engine.flights.clear()
            self.manager.client_exited(old)
        elif how == "leave":
            engine.flights.clear()
            engine.leave()
        else:
            engine.pid += 10
        engine.register()
        assert self.manager.handle(Step(epoch=old, num=1, done_step=0)) == Fenced(old)
        if how == "register":
            # the old process may write until it is reaped
            check(self.manager)
            for flight in engine.flights:
                flight.step = 1 << 40
            engine.scribble()
            engine.flights.clear()
            self.manager.client_exited(old)
        self.settle_drafts(engine)

    def settle_drafts(self, engine: ModelEngine) -> None:
        draft = self.drafts.get(engine.name)
        if draft is not None:
            draft.acknowledge(engine.epoch)

    @rule(index=indices, how=st.sampled_from(["join", "exit", "leave"]))
    def change_draft(self, index: int, how: str) -> None:
        engine = self.engines[index % self.num_engines]
        draft = self.drafts.pop(engine.name, None)
        if draft is not None and how == "exit":
            self.manager.client_exited(draft.epoch)
        elif draft is not None and how == "leave":
            draft.leave()
        else:
            if draft is not None:
                self.manager.client_exited(draft.epoch)
            self.drafts[engine.name] = Engine(
                self.manager,
                name=engine.name,
                role="draft",
                kinds=("draft_kv",),
                fingerprint=engine.fingerprint,
                pid=99,
            )

    @rule(seconds=st.sampled_from([0.5, 1.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        late = {e.name: e.epoch for e in self.engines}
        assert self.manager.tick() >= 0
        for engine in self.engines:
            reply = self.manager.handle(Step(epoch=engine.epoch, num=engine.num + 1, done_step=engine.done))
            if isinstance(reply, Fenced):
                assert late[engine.name] == engine.epoch
                engine.reqs.clear()
                engine.flights.clear()
                self.manager.client_exited(engine.epoch)
                engine.register()
                self.settle_drafts(engine)
            else:
                assert isinstance(reply, Stepped)
                engine.num += 1
                engine.apply(reply)

    # --- the operator ---

    @rule(tokens=tokens_of, name=st.sampled_from("ab"))
    def pin(self, tokens: list[int], name: str) -> None:
        matched = self.manager.handle_admin(Match(tokens=pack_tokens(tokens)))
        assert isinstance(matched, Matched)
        self.manager.handle_admin(Pin(name=name, tokens=pack_tokens(tokens), ttl_s=2.0))

    @rule(name=st.sampled_from("ab"))
    def unpin(self, name: str) -> None:
        self.manager.handle_admin(Unpin(name=name))

    @rule()
    @precondition(lambda self: self.running() == 0)
    def flush(self) -> None:
        self.lossless = False
        self.manager.handle_admin(Flush())

    @rule(num=st.integers(1, 3), kind=st.integers(0, 3))
    def evict(self, num: int, kind: int) -> None:
        before = self.stats()
        evicted = self.manager.handle_admin(Evict(kind=self.kinds[kind % len(self.kinds)].name, num_pages=num))
        assert isinstance(evicted, Evicted)
        after = self.stats()
        for old, new, freed in zip(before.kinds, after.kinds, evicted.num_pages, strict=True):
            assert old.num_tree - new.num_tree == freed

    @invariant()
    def all_holds(self) -> None:
        check(self.manager)
        if self.is_exact():
            assert self.stats().num_checkpoints == self.published.frozen.num

    def teardown(self) -> None:
        for engine in self.engines:
            engine.leave()
        for draft in self.drafts.values():
            draft.leave()
        if self.engines:
            report = check(self.manager)
            stats = self.stats()
            assert stats.num_reqs == 0
            assert all(k.num_private + k.num_limbo + k.num_quarantine == 0 for k in stats.kinds)
            for name in "ab":
                self.manager.handle_admin(Unpin(name=name))
            self.manager.handle_admin(Flush())
            stats = self.stats()
            assert stats.frames_empty == stats.num_frames - 1
            assert report.leaked_bytes == 0
