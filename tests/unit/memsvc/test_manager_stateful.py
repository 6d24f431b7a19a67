"""Random engines against one manager: every exit path of a request is a rule, check() runs after every rule."""

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import Evict, Evicted, Flush, GetStats, Match, Matched, Pin, Stats, Unpin
from memsvc.wire.base import BadRequest, ReqId, pack_tokens
from memsvc.wire.mem import (
    Close,
    Commit,
    Fenced,
    KindSpec,
    Opened,
    OpenReq,
    Reserve,
    ResetDraft,
    Step,
    Stepped,
    TooLarge,
)
from tests.support import hypothesis_profiles
from tests.support.mem_builders import DRAFT, TARGET, Clock, Engine, check, make_config, windowed
from tests.support.mem_model import Memory, ModelEngine, Published

PROFILE = hypothesis_profiles.load()

tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=14)
flips = st.integers(0, 3)


class Pool(RuleBasedStateMachine):
    """One engine, two kinds, no window."""

    num_engines = 1
    num_frames = 14
    kinds: tuple[KindSpec, ...] = (TARGET, DRAFT)
    window = 0
    config: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        config = make_config(self.num_frames, list(self.kinds), pin_budget_frames=1, **self.config)
        self.manager = MemoryManager(config, clock=self.clock)
        self.memory = Memory([kind.pages_per_frame for kind in self.manager.layout.kinds])
        self.published = Published()
        self.engines: list[ModelEngine] = []
        self.next_rid = 1
        self.lossless = True
        self.drafts: dict[str, Engine] = {}

    @initialize()
    def start(self) -> None:
        for index in range(self.num_engines):
            engine = ModelEngine(self.manager, name=f"e{index}", pid=index + 1, fingerprint="model")
            engine.setup(self.memory, self.published, self.window)
            self.engines.append(engine)

    # --- steps ---

    def pick(self, data: st.DataObject) -> ModelEngine:
        return data.draw(st.sampled_from(self.engines), label="engine")

    def subset(self, data: st.DataObject, rids: list[int], label: str) -> list[int]:
        return [rid for rid in rids if data.draw(flips, label=f"{label} {rid}") > 0]

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        engine = self.pick(data)
        parts: dict[str, Any] = {}
        self.draw_commit(data, engine, parts)
        closing = self.draw_closes(data, engine)
        if data.draw(flips, label="reset") == 0:
            rids = self.subset(data, list(engine.reqs), "reset")
            for rid in rids:
                engine.reset_req(rid)
            parts["reset_draft"] = ResetDraft(rids=[ReqId(rid) for rid in rids])
        for rid in closing:
            engine.closed_req(rid)
        if closing:
            reason = data.draw(st.sampled_from(["finish", "abort", "retract"]), label="reason")
            parts["closes"] = [Close(rids=[ReqId(rid) for rid in closing], reason=reason)]
        self.draw_reserve(data, engine, parts)
        opens = self.draw_opens(data, parts)
        engine.done = data.draw(st.integers(engine.done, engine.num), label="done")
        engine.scribble()
        reply = engine.step(done_step=engine.done, **parts)
        self.check_opens(engine, opens, reply)
        self.check_no_room(engine, parts, reply)
        engine.apply(reply)
        self.maybe_repeat(data, engine, parts, reply)

    def draw_commit(self, data: st.DataObject, engine: ModelEngine, parts: dict[str, Any]) -> None:
        rows: list[tuple[int, int, int, bytes]] = []
        for rid in self.subset(data, list(engine.reqs), "commit"):
            req = engine.reqs[rid]
            room = min(req.slots, req.limit)
            target = data.draw(st.integers(req.target_len, max(req.target_len, room)), label="target")
            draft = req.draft_len
            if data.draw(flips, label="draft keeps up"):
                draft = max(draft, min(target, req.draft_slots))
            new = data.draw(st.lists(st.integers(0, 1), min_size=0, max_size=2), label="tokens past")
            need = max(0, target - len(req.tokens))
            tokens = [0] * need + new
            tokens = tokens[: max(need, req.limit - len(req.tokens))]
            engine.commit_req(rid, target, draft, tokens)
            engine.published_by(rid)
            rows.append((rid, target, draft, pack_tokens(tokens)))
        if rows:
            rids, targets, drafts, tokens_list = (list(column) for column in zip(*rows, strict=True))
            parts["commit"] = Commit(rids=rids, target_lens=targets, draft_lens=drafts, tokens=tokens_list)

    def draw_closes(self, data: st.DataObject, engine: ModelEngine) -> list[int]:
        wanted = [rid for rid in engine.retract if rid in engine.reqs]
        engine.retract = []
        others = [rid for rid in engine.reqs if rid not in wanted]
        return wanted + [rid for rid in others if data.draw(flips, label=f"close {rid}") == 0]

    def draw_reserve(self, data: st.DataObject, engine: ModelEngine, parts: dict[str, Any]) -> None:
        rids = self.subset(data, list(engine.reqs), "reserve")
        most = self.config.get("max_extend_tokens", 12)
        nums = [
            data.draw(st.integers(0, min(most, engine.reqs[rid].limit - engine.reqs[rid].target_len)), label="num")
            for rid in rids
        ]
        if rids:
            parts["reserve"] = Reserve(rids=[ReqId(rid) for rid in rids], nums=nums)

    def draw_opens(self, data: st.DataObject, parts: dict[str, Any]) -> list[OpenReq]:
        opens = []
        for _ in range(data.draw(st.integers(0, 2), label="opens")):
            op = OpenReq(
                rid=ReqId(self.next_rid),
                tokens=pack_tokens(data.draw(tokens_of, label="prompt")),
                max_new=data.draw(st.integers(0, 8), label="max_new"),
                salt=data.draw(st.sampled_from(["", "", "", "s"]), label="salt"),
                priority=data.draw(st.integers(0, 1), label="priority"),
            )
            self.next_rid += 1
            opens.append(op)
        if opens:
            parts["opens"] = opens
        return opens

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
        expected = self.published.hit(engine.fingerprint, op.salt, tokens)
        assert answer.prefix_len <= expected
        if self.evicted() or not self.lossless:
            return
        assert answer.prefix_len == expected
        valid_from = self.published.valid_from(engine.fingerprint, op.salt, tokens, expected, self.window)
        assert answer.draft_valid_from == valid_from

    def check_no_room(self, engine: ModelEngine, parts: dict[str, Any], reply: Stepped) -> None:
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
        self.last_no_room = reply.no_room

    def maybe_repeat(self, data: st.DataObject, engine: ModelEngine, parts: dict[str, Any], reply: Stepped) -> None:
        if data.draw(flips, label="repeat") == 0:
            again = self.manager.handle(Step(epoch=engine.epoch, num=engine.num, done_step=engine.done, **parts))
            assert again == reply
            gap = self.manager.handle(Step(epoch=engine.epoch, num=engine.num + 2, done_step=engine.done))
            assert isinstance(gap, BadRequest)

    def stats(self) -> Stats:
        stats = self.manager.handle_admin(GetStats())
        assert isinstance(stats, Stats)
        return stats

    def evicted(self) -> bool:
        return any(self.stats().evicted_pages)

    def running(self) -> int:
        return sum(len(engine.reqs) for engine in self.engines)

    def returning(self) -> int:
        return sum(kind.num_limbo + kind.num_quarantine for kind in self.stats().kinds)

    # --- the ways out ---

    @rule(data=st.data(), how=st.sampled_from(["exit", "register", "leave"]))
    def lose_engine(self, data: st.DataObject, how: str) -> None:
        if data.draw(flips, label="really") > 0:
            return
        engine = self.pick(data)
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

    @rule(data=st.data(), how=st.sampled_from(["join", "exit", "leave"]))
    def change_draft(self, data: st.DataObject, how: str) -> None:
        engine = self.pick(data)
        draft = self.drafts.pop(engine.name, None)
        if draft is not None and how == "exit":
            self.manager.client_exited(draft.epoch)
        elif draft is not None and how == "leave":
            draft.leave()
        else:
            if draft is not None:
                self.manager.client_exited(draft.epoch)
            self.drafts[engine.name] = Engine(
                self.manager, name=engine.name, role="draft", kinds=("draft_kv",), fingerprint="model", pid=99
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

    @rule(num=st.integers(1, 3), kind=st.sampled_from(["target_kv", "draft_kv"]))
    def evict(self, num: int, kind: str) -> None:
        before = self.stats()
        evicted = self.manager.handle_admin(Evict(kind=kind, num_pages=num))
        assert isinstance(evicted, Evicted)
        after = self.stats()
        for old, new, freed in zip(before.kinds, after.kinds, evicted.num_pages, strict=True):
            assert old.num_tree - new.num_tree == freed

    @invariant()
    def all_holds(self) -> None:
        check(self.manager)

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


class TwoEngines(Pool):
    """Two engines of the same model share pool and tree."""

    num_engines = 2
    num_frames = 12


class Windowed(Pool):
    """Draft pages below the last four tokens are given up while a request runs."""

    kinds = (TARGET, windowed(DRAFT, 4))
    window = 4
    config: ClassVar[dict[str, Any]] = {"max_extend_tokens": 6}


class Roomy(Pool):
    """Large enough that nothing is evicted unless asked to: hits are exactly what the model says."""

    num_frames = 200


class RoomyWindowed(Windowed):
    """The same with a window that is no whole number of pages."""

    num_frames = 200
    kinds = (TARGET, windowed(DRAFT, 3))
    window = 3


class Limited(TwoEngines):
    """Quotas for an engine and a salt, lfu, and a low watermark."""

    num_frames = 16
    config: ClassVar[dict[str, Any]] = {
        "engine_quota_frames": {"e0": 9},
        "salt_quota_frames": {"s": 7},
        "eviction_policy": "lfu",
        "low_watermark": 0.1,
    }


class Important(Pool):
    """Eviction by priority."""

    config: ClassVar[dict[str, Any]] = {"eviction_policy": "priority"}


def _case(machine: type[Pool]) -> Any:
    case = machine.TestCase
    case.settings = PROFILE
    return case


TestPool = _case(Pool)
TestTwoEngines = _case(TwoEngines)
TestWindowed = _case(Windowed)
TestRoomy = _case(Roomy)
TestRoomyWindowed = _case(RoomyWindowed)
TestLimited = _case(Limited)
TestImportant = _case(Important)
