"""Builders for tests of the memory manager: small pools, a clock to turn by hand, an obedient engine."""

from dataclasses import dataclass, field
from typing import Any

from memsvc.core.config import PoolConfig
from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import Check, CheckReport, GetStats, Stats
from memsvc.wire.base import WIRE_VERSION, Epoch, ReqId, pack_tokens
from memsvc.wire.mem import (
    AckEpoch,
    Close,
    Commit,
    Freeze,
    KindSpec,
    Leave,
    MemReply,
    NoRoom,
    OpenReq,
    Register,
    Registered,
    Reserve,
    ResetDraft,
    Step,
    Stepped,
)

PAGE_SIZE = 2
TARGET = KindSpec(name="target_kv", page_bytes=768, tokens_per_page=PAGE_SIZE)
DRAFT = KindSpec(name="draft_kv", page_bytes=512, tokens_per_page=PAGE_SIZE)
FRAME_BYTES = 1536
"""Frames of TARGET and DRAFT: 2 target pages or 3 draft pages, nothing wasted."""
STATE = KindSpec(name="state", page_bytes=1536, tokens_per_page=0, pages_per_req=2, is_state=True)
RING = KindSpec(name="ring", page_bytes=768, tokens_per_page=0, pages_per_req=1)
RECURRENT = (TARGET, DRAFT, STATE, RING)
NAMES = tuple(kind.name for kind in RECURRENT)


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def windowed(kind: KindSpec, window: int) -> KindSpec:
    """The kind with only its last `window` tokens ever read."""
    return KindSpec(name=kind.name, page_bytes=kind.page_bytes, tokens_per_page=kind.tokens_per_page, window=window)


def make_config(num_frames: int = 16, kinds: list[KindSpec] | None = None, **changes: Any) -> PoolConfig:
    """A pool of num_frames frames of 1536 bytes, the dummy frame among them."""
    kinds = kinds or [TARGET, DRAFT]
    fields: dict[str, Any] = {"slack_tokens": 4, "high_watermark": 0.25, **changes}
    return PoolConfig(arena_bytes=num_frames * FRAME_BYTES, page_size=PAGE_SIZE, kinds=kinds, **fields)


def make_manager(num_frames: int = 16, kinds: list[KindSpec] | None = None, **changes: Any) -> MemoryManager:
    """A manager of such a pool, its clock at manager.clock."""
    return MemoryManager(make_config(num_frames, kinds, **changes), clock=changes.pop("clock", Clock()))


def check(manager: MemoryManager) -> CheckReport:
    """The report, after asserting that it is clean."""
    report = manager.handle_admin(Check())
    assert isinstance(report, CheckReport)
    assert not report.problems, "\n".join(str(problem) for problem in report.problems)
    assert report.leaked_bytes == 0
    return report


@dataclass
class Engine:
    """One client that numbers its steps. step() asserts that the reply is Stepped; send() does not."""

    manager: MemoryManager
    name: str = "e"
    role: str = "target"
    kinds: tuple[str, ...] = ("target_kv", "draft_kv")
    fingerprint: str = "model"
    pid: int = 1
    num: int = 0
    done: int = 0
    epoch: Epoch = field(default=Epoch(0))

    def __post_init__(self) -> None:
        self.register()

    def register(self) -> None:
        """Join, or join again."""
        reply = self.manager.handle(
            Register(
                wire_version=WIRE_VERSION,
                engine=self.name,
                role=self.role,
                kinds=list(self.kinds),
                model_fingerprint=self.fingerprint,
                pid=self.pid,
            )
        )
        assert isinstance(reply, Registered), reply
        self.epoch, self.num, self.done = reply.epoch, 0, 0

    def send(self, **parts: Any) -> MemReply:
        """The next step, whatever the reply. done_step is the step before it unless given."""
        parts.setdefault("done_step", self.done)
        return self.manager.handle(Step(epoch=self.epoch, num=self.num + 1, **parts))

    def step(self, **parts: Any) -> Stepped:
        """The next step; everything before it is done afterwards."""
        reply = self.send(**parts)
        assert isinstance(reply, Stepped), reply
        self.num += 1
        self.done = self.num - 1 if "done_step" not in parts else self.done
        return reply

    def open(self, rid: int, tokens: list[int], max_new: int = 8, **fields: Any) -> Stepped:
        """A step with one open."""
        op = OpenReq(rid=ReqId(rid), tokens=pack_tokens(tokens), max_new=max_new, **fields)
        return self.step(opens=[op])

    def reserve(self, rid: int, num: int) -> Stepped:
        """A step with one reservation."""
        return self.step(reserve=Reserve(rids=[ReqId(rid)], nums=[num]))

    def commit(self, rid: int, target: int, draft: int | None = None, tokens: list[int] | None = None) -> Stepped:
        """A step with one commit; the draft keeps up unless it says otherwise."""
        draft = target if draft is None else draft
        return self.step(commit=make_commit(rid, target, draft, tokens or []))

    def freeze(self, rid: int, length: int) -> Stepped:
        """A step with one freeze."""
        return self.step(freeze=make_freeze(rid, length))

    def close(self, rid: int, reason: str = "finish", freeze_at: int = 0) -> Stepped:
        """A step with one close, and the state given away if it stands somewhere."""
        freeze = make_freeze(rid, freeze_at) if freeze_at else None
        return self.step(closes=[Close(rids=[ReqId(rid)], reason=reason)], freeze=freeze)

    def reset_draft(self, rid: int) -> Stepped:
        """A step that says the draft has lost rid."""
        return self.step(reset_draft=ResetDraft(rids=[ReqId(rid)]))

    def run(self, rid: int, tokens: list[int], **fields: Any) -> Stepped:
        """Open rid, fill its whole prompt, commit it. Returns the reply to the open."""
        opened = self.open(rid, tokens, **fields)
        prefix = opened.opened[0].prefix_len  # type: ignore[union-attr]
        assert self.reserve(rid, len(tokens) - prefix).no_room is None
        self.commit(rid, len(tokens))
        return opened

    def leave(self) -> MemReply:
        """End without quarantine."""
        return self.manager.handle(Leave(epoch=self.epoch))

    def acknowledge(self, fenced_before: Epoch) -> MemReply:
        """As a co-writer: older epochs are dropped."""
        return self.manager.handle(AckEpoch(epoch=self.epoch, fenced_before=fenced_before))


def make_commit(rid: int, target: int, draft: int, tokens: list[int]) -> Commit:
    """Columns of one row."""
    return Commit(rids=[ReqId(rid)], target_lens=[target], draft_lens=[draft], tokens=[pack_tokens(tokens)])


def make_freeze(rid: int, length: int) -> Freeze:
    """Columns of one row."""
    return Freeze(rids=[ReqId(rid)], lens=[length])


def reserve(engine: Engine, **nums: int) -> Stepped:
    """A step that reserves for several requests: reserve(engine, r1=4, r2=4)."""
    rids = [ReqId(int(name[1:])) for name in nums]
    return engine.step(reserve=Reserve(rids=rids, nums=list(nums.values())))


def retract(engine: Engine, *rids: int) -> None:
    """Retract requests and let limbo drain."""
    engine.step(closes=[Close([ReqId(rid) for rid in rids], "retract")])
    engine.step(done_step=engine.num)


def stats_of(manager: MemoryManager) -> Stats:
    """The counters."""
    stats = manager.handle_admin(GetStats())
    assert isinstance(stats, Stats)
    return stats


def refusal(reply: Stepped) -> NoRoom:
    """The NoRoom of a reservation, after asserting that nothing else was done."""
    assert reply.no_room is not None, reply
    assert reply.grow_pages == []
    assert reply.opened == []
    return reply.no_room
