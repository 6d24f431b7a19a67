"""Memory as the scheduler of the pool benchmark sees it: one pool for all kinds, or KV and states apart."""

import time
from dataclasses import dataclass, field

from memsvc.core.manager import MemoryManager
from memsvc.core.page_states import FREE
from memsvc.wire.base import WIRE_VERSION, ReqId
from memsvc.wire.mem import Close, Commit, Freeze, Opened, OpenReq, Register, Registered, Reserve, Step, Stepped
from tests.bench.pool_modes import STATE_BYTES, STATE_LAYERS, Mode
from tests.bench.pool_states import StateSlots

Waste = dict[str, dict[str, float]]
"""Bytes by cause and kind."""


@dataclass(slots=True)
class Turn:
    """What one step of the scheduler asks of the memory, in columns."""

    rids: list[ReqId] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    freezes: list[tuple[ReqId, int, bytes]] = field(default_factory=list)
    """Request, length, and a text of which that many tokens are the prefix."""
    closes: dict[str, list[ReqId]] = field(default_factory=dict)
    reserve_rids: list[ReqId] = field(default_factory=list)
    nums: list[int] = field(default_factory=list)
    opens: list[OpenReq] = field(default_factory=list)

    @property
    def num_ops(self) -> int:
        """Single operations in it."""
        closes = sum(len(rids) for rids in self.closes.values())
        return len(self.rids) + len(self.freezes) + closes + len(self.reserve_rids) + len(self.opens)


@dataclass(frozen=True, slots=True)
class Admitted:
    """An open that was granted: computed up to hit_len, with KV up to kv_len, states worth keeping at `places`."""

    rid: ReqId
    hit_len: int
    kv_len: int
    places: list[int]


@dataclass(slots=True)
class Granted:
    """The answer to a Turn."""

    admitted: list[Admitted] = field(default_factory=list)
    too_large: list[ReqId] = field(default_factory=list)
    refused: str = ""
    """Which pool had no room for the next open; empty if none was refused."""
    victims: list[ReqId] | None = None
    """None if the reservation fitted; else whom to retract, perhaps nobody."""
    frozen: set[ReqId] = field(default_factory=set)


class UnifiedMemory:
    """Every kind in one MemoryManager."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.now = 0.0
        self.manager_s = 0.0
        self.num_ops = 0
        self.manager = MemoryManager(mode.config, clock=lambda: self.now)
        layout = self.manager.layout
        self.page_size = layout.page_size
        names = [kind.name for kind in layout.kinds]
        self._state = next((i for i, kind in enumerate(layout.kinds) if kind.is_state), -1)
        reply = self.manager.handle(Register(WIRE_VERSION, "bench", "target", names, "27b", 1))
        assert isinstance(reply, Registered)
        self._epoch = reply.epoch
        self._num = 0

    def send(self, turn: Turn) -> Granted:
        """One Step. Everything that ran beside the last one is over by then."""
        stepped = self._step(turn)
        granted = Granted(refused="pool" if stepped.open_no_room else "")
        if stepped.no_room is not None:
            granted.victims = list(stepped.no_room.victims)
        for answer in stepped.opened:
            if isinstance(answer, Opened):
                hit = answer.prefix_len
                granted.admitted.append(Admitted(answer.rid, hit, hit, answer.checkpoint_at))
            else:
                granted.too_large.append(answer.rid)
        granted.frozen = {
            rid for rid, kind in zip(stepped.remap_rids, stepped.remap_kinds, strict=True) if kind == self._state
        }
        return granted

    def _step(self, turn: Turn) -> Stepped:
        self._num += 1
        freezes = [(rid, at) for rid, at, _ in turn.freezes]
        message = Step(
            epoch=self._epoch,
            num=self._num,
            done_step=self._num - 1,
            commit=Commit(turn.rids, turn.lens, turn.lens, turn.tokens) if turn.rids else None,
            closes=[Close(rids, reason) for reason, rids in turn.closes.items()],
            reserve=Reserve(turn.reserve_rids, turn.nums) if turn.reserve_rids else None,
            opens=turn.opens,
            freeze=Freeze([rid for rid, _ in freezes], [at for _, at in freezes]) if freezes else None,
        )
        began = time.perf_counter()
        reply = self.manager.handle(message)
        self.manager_s += time.perf_counter() - began
        self.num_ops += turn.num_ops
        assert isinstance(reply, Stepped), reply
        return reply

    def waste(self, num_running: int, refused: str) -> Waste:
        """Bytes that hold nothing anyone asked for. `idle`: not held by running requests, and yet the next is refused."""
        geometry, holes, padding = {}, {}, {}
        layout, pool = self.manager.layout, self.manager._store.pool
        for index, kind in enumerate(layout.kinds):
            cut, counts = pool.num_cut[index], pool.counts[index]
            geometry[kind.name] = cut * (layout.frame_bytes - kind.pages_per_frame * kind.page_bytes)
            holes[kind.name] = counts[FREE] * kind.page_bytes
            used = cut * kind.pages_per_frame - counts[FREE]
            padding[kind.name] = used * (kind.page_bytes - self.mode.content_bytes[index])
        idle = pool.frames_available * layout.frame_bytes if refused else 0
        scratch = num_running * self.mode.scratch_bytes
        return {
            "geometry": geometry,
            "holes": holes,
            "padding": padding,
            "scratch": {"state": scratch},
            "idle": {"pool": idle},
        }


class SplitMemory(UnifiedMemory):
    """Token kinds in a MemoryManager, states beside it. The KV of a prefix without a state is shared, not skipped."""

    def __init__(self, mode: Mode) -> None:
        super().__init__(mode)
        state = STATE_LAYERS * STATE_BYTES
        self.states = StateSlots(mode.state_pool_bytes, mode.state_run_bytes, state)
        kv_page = next(kind.page_bytes for kind in mode.config.kinds)
        self._interval = round(2 * state / kv_page) * self.page_size

    def send(self, turn: Turn) -> Granted:
        """As UnifiedMemory; opens past what the state pool takes are not sent on."""
        freezes, turn.freezes = turn.freezes, []
        closing = {rid for rids in turn.closes.values() for rid in rids}
        frozen = {rid for rid, at, text in freezes if rid not in closing and self.states.store(text, at)}
        for _ in closing:
            self.states.release()
        for rid, at, text in freezes:
            if rid in closing:
                self.states.store(text, at)
        asked = len(turn.opens)
        turn.opens = turn.opens[: max(0, self.states.num_admissible)]
        granted = super().send(turn)
        granted.refused = "kv" if granted.refused else "state" if len(turn.opens) < asked else ""
        opens = {op.rid: op for op in turn.opens}
        granted.admitted = [self._admit(opens[a.rid].tokens, a) for a in granted.admitted]
        granted.frozen = frozen
        return granted

    def _admit(self, text: bytes, admitted: Admitted) -> Admitted:
        self.states.admit()
        kv, page = admitted.kv_len, self.page_size
        hit, last = self.states.find(text, kv), (len(text) // 4 - 1) // page * page
        inner = range((hit // self._interval + 1) * self._interval, last, self._interval)
        places = sorted(place for place in {kv, last, *inner} if place > hit)
        return Admitted(admitted.rid, hit, kv, places)

    def waste(self, num_running: int, refused: str) -> Waste:
        """`idle` names the pool that has room while the other one refuses; `unused` is a state pool's rest."""
        found = super().waste(num_running, refused)
        found["idle"] = {
            "kv": found["idle"]["pool"] if refused == "state" else 0,
            "state": self.mode.state_pool_bytes - self.states.running_bytes if refused == "kv" else 0,
        }
        return found


def make_memory(mode: Mode) -> UnifiedMemory:
    """The memory of a mode."""
    return SplitMemory(mode) if mode.state_pool_bytes else UnifiedMemory(mode)
