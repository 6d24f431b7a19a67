"""Nobody waits for ever: random loads on pools far too small for them, run by engines that obey."""

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from memsvc.core.manager import MemoryManager
from memsvc.wire.admin import GetStats, Stats
from memsvc.wire.base import ReqId, pack_tokens
from memsvc.wire.mem import Close, Commit, KindSpec, NoRoom, Opened, OpenReq, Reserve, Stepped, TooLarge
from tests.support import hypothesis_profiles
from tests.support.mem_builders import DRAFT, RING, STATE, TARGET, Clock, check, make_config, windowed
from tests.support.mem_model import Memory, ModelEngine, Published

PROFILE = hypothesis_profiles.load()
SLACK = 4
BLOCK = 2
CHUNK = 6
LAG = 2


@dataclass
class Job:
    """A request over all its retractions."""

    rid: int
    tokens: list[int]
    total: int
    salt: str
    priority: int


class Worker(ModelEngine):
    """Reserves for all that runs, commits what it got, closes victims, opens what waits: as a scheduler does."""

    at_once = False
    """Whether victims are closed before anything else is done."""

    def begin(self, dice: Random, jobs: list[Job]) -> None:
        self.dice = dice
        self.waiting = deque(jobs)
        self.jobs: dict[int, Job] = {}
        self.victims: list[int] = []
        self.granted: set[int] = set()
        self.num_obeyed = 0
        self.num_done = self.num_refused = self.num_retracted = self.num_last_rung = 0

    def obey_at_once(self, reply: Stepped, asked: Reserve) -> Stepped:
        """Close the victims, let everything in flight end, and ask for the rest again: it must fit."""
        assert reply.no_room is not None
        self.victims = list(reply.no_room.victims)
        parts: dict[str, Any] = {}
        self.close_some(parts)
        self.apply(self.step(done_step=self.done, **parts))
        self.done = self.num
        rest = [(rid, num) for rid, num in zip(asked.rids, asked.nums, strict=True) if rid in self.reqs]
        again = Reserve(rids=[rid for rid, _ in rest], nums=[num for _, num in rest])
        reply = self.step(done_step=self.done, reserve=again)
        assert reply.no_room is None, reply.no_room
        self.apply(reply)
        return reply

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.jobs)

    def turn(self) -> Stepped:
        """One scheduler step."""
        parts: dict[str, Any] = {}
        self.commit_granted(parts)
        self.close_some(parts)
        self.reserve_all(parts)
        opens = self.open_some(parts)
        self.done = max(self.done, self.num - self.dice.randint(0, LAG))
        self.scribble()
        reply = self.step(done_step=self.done, **parts)
        self.take_opened(opens, reply)
        self.apply(reply)
        self.victims = list(reply.retract)
        if reply.no_room is not None:
            assert reply.no_room.victims or reply.no_room.waiting_on, reply.no_room
            if self.at_once and reply.no_room.victims:
                self.num_obeyed += 1
                reply = self.obey_at_once(reply, parts["reserve"])
            else:
                self.victims += reply.no_room.victims
        else:
            self.granted = set(self.reqs)
        return reply

    def commit_granted(self, parts: dict[str, Any]) -> None:
        rows: list[tuple[int, int, int, bytes]] = []
        for rid in sorted(self.granted & self.reqs.keys()):
            req, job = self.reqs[rid], self.jobs[rid]
            target = min(req.target_len + self.dice.randint(1, CHUNK), req.slots, job.total)
            if target >= len(req.tokens):
                target = min(target, len(req.tokens) + BLOCK)
            if target <= req.target_len:
                continue
            new = [self.dice.randint(0, 1) for _ in range(min(target + 1, job.total) - len(req.tokens))]
            draft = target if self.dice.random() < 0.9 else req.draft_len
            self.commit_req(rid, target, draft, new)
            self.published_by(rid)
            rows.append((rid, target, draft, pack_tokens(new)))
        self.granted = set()
        if rows:
            rids, targets, drafts, tokens = (list(column) for column in zip(*rows, strict=True))
            parts["commit"] = Commit(rids=rids, target_lens=targets, draft_lens=drafts, tokens=tokens)

    def close_some(self, parts: dict[str, Any]) -> None:
        ended = [rid for rid, req in self.reqs.items() if req.target_len >= self.jobs[rid].total]
        victims = [rid for rid in dict.fromkeys(self.victims) if rid in self.reqs and rid not in ended]
        self.victims = []
        parts["closes"] = [
            Close(rids=[ReqId(rid) for rid in rids], reason=reason)
            for reason, rids in (("finish", ended), ("retract", victims))
            if rids
        ]
        for rid in ended:
            self.closed_req(rid)
            del self.jobs[rid]
            self.num_done += 1
        for rid in reversed(victims):
            job = self.jobs.pop(rid)
            job.tokens = self.closed_req(rid).tokens
            self.waiting.appendleft(job)
            self.num_retracted += 1

    def reserve_all(self, parts: dict[str, Any]) -> None:
        rids = list(self.reqs)
        nums = []
        for rid in rids:
            req = self.reqs[rid]
            rest = len(req.tokens) - req.target_len
            nums.append(min(CHUNK, rest if rest > BLOCK else 2 * BLOCK, self.jobs[rid].total + SLACK - req.target_len))
        if rids:
            parts["reserve"] = Reserve(rids=[ReqId(rid) for rid in rids], nums=nums)

    def open_some(self, parts: dict[str, Any]) -> list[tuple[Job, OpenReq]]:
        opens = []
        for job in list(self.waiting)[: self.dice.randint(1, 3)]:
            tokens = pack_tokens(job.tokens)
            op = OpenReq(
                rid=ReqId(job.rid),
                tokens=tokens,
                max_new=job.total - len(job.tokens),
                salt=job.salt,
                priority=job.priority,
            )
            opens.append((job, op))
        parts["opens"] = [op for _, op in opens]
        return opens

    def take_opened(self, opens: list[tuple[Job, OpenReq]], reply: Stepped) -> None:
        for (job, op), answer in zip(opens, reply.opened, strict=False):
            assert self.waiting.popleft() is job
            if isinstance(answer, TooLarge):
                self.num_refused += 1
                continue
            assert isinstance(answer, Opened)
            self.opened(answer, job.tokens, job.total + SLACK, op.salt)
            self.jobs[job.rid] = job


def make_jobs(dice: Random, first_rid: int, num: int, longest: int) -> list[Job]:
    jobs, texts = [], [[dice.randint(0, 1) for _ in range(longest)] for _ in range(2)]
    for rid in range(first_rid, first_rid + num):
        shared = dice.choice(texts)[: dice.randint(0, longest // 2)]
        prompt = shared + [dice.randint(0, 1) for _ in range(dice.randint(1, 4))]
        total = len(prompt) + dice.randint(1, longest)
        jobs.append(Job(rid, prompt, total, dice.choice(["", "", "s"]), dice.randint(0, 1)))
    return jobs


def run_load(
    seed: int, num_engines: int, num_frames: int, kinds: list[KindSpec], at_once: bool = False, **config: Any
) -> list[Worker]:
    """Run a load to its end, engines in random turn; fails if it does not end."""
    dice, clock = Random(seed), Clock()
    manager = MemoryManager(make_config(num_frames, kinds, retract_ms=100_000, **config), clock=clock)
    memory = Memory([kind.pages_per_frame for kind in manager.layout.kinds])
    published, names = Published(), tuple(kind.name for kind in kinds)
    workers = [Worker(manager, name=f"e{i}", pid=i + 1, kinds=names) for i in range(num_engines)]
    window = max(kind.window for kind in kinds)
    for index, worker in enumerate(workers):
        worker.setup(memory, published, window)
        worker.at_once = at_once
        worker.begin(dice, make_jobs(dice, 1 + 100 * index, dice.randint(2, 6), longest=14))
    turns = 0
    while any(worker.busy for worker in workers):
        worker = dice.choice(workers)
        elder_before = stats_of(manager).elder
        reply = worker.turn()
        check(manager)
        look_at_victims(worker, reply, elder_before)
        turns += 1
        assert turns < 2000 * num_engines, f"no end in sight: {[(w.waiting, w.jobs) for w in workers]}"
        assert isinstance(reply.open_no_room, NoRoom | None)
    for worker in workers:
        worker.leave()
    check(manager)
    return workers


def stats_of(manager: MemoryManager) -> Stats:
    stats = manager.handle_admin(GetStats())
    assert isinstance(stats, Stats)
    return stats


def look_at_victims(worker: Worker, reply: Stepped, elder: int) -> None:
    elder = stats_of(worker.manager).elder
    if reply.no_room is not None and elder in reply.no_room.victims:
        assert reply.no_room.victims == [elder], "the elder gives way only when it is alone"
        assert stats_of(worker.manager).num_reqs == 1
        worker.num_last_rung += 1


seeds = st.integers(0, 2**32)


@PROFILE
@given(seed=seeds, num_frames=st.integers(8, 14))
def test_every_request_of_one_engine_completes(seed: int, num_frames: int) -> None:
    run_load(seed, 1, num_frames, [TARGET, DRAFT])


@PROFILE
@given(seed=seeds, num_engines=st.integers(2, 3), num_frames=st.integers(8, 14))
def test_every_request_of_several_engines_completes(seed: int, num_engines: int, num_frames: int) -> None:
    run_load(seed, num_engines, num_frames, [TARGET, DRAFT])


@PROFILE
@given(seed=seeds, num_engines=st.integers(1, 2), num_frames=st.integers(8, 14))
def test_every_request_with_a_window_completes(seed: int, num_engines: int, num_frames: int) -> None:
    run_load(seed, num_engines, num_frames, [TARGET, windowed(DRAFT, 4)], max_extend_tokens=CHUNK)


@PROFILE
@given(seed=seeds, num_engines=st.integers(1, 2), num_frames=st.integers(12, 20))
def test_every_request_with_recurrent_state_completes(seed: int, num_engines: int, num_frames: int) -> None:
    run_load(seed, num_engines, num_frames, [TARGET, DRAFT, STATE, RING])


@PROFILE
@given(seed=seeds, num_frames=st.integers(10, 16))
def test_every_request_within_quotas_completes(seed: int, num_frames: int) -> None:
    quotas: dict[str, Any] = {"engine_quota_frames": {"e0": 8}, "salt_quota_frames": {"s": 7}}
    run_load(seed, 2, num_frames, [TARGET, DRAFT], low_watermark=0.05, **quotas)


@PROFILE
@given(seed=seeds, num_frames=st.integers(8, 12), window=st.booleans())
def test_victims_are_enough_for_the_rest_of_the_reservation(seed: int, num_frames: int, window: bool) -> None:
    draft, bound = (windowed(DRAFT, 4), CHUNK) if window else (DRAFT, 0)
    run_load(seed, 1, num_frames, [TARGET, draft], at_once=True, max_extend_tokens=bound)
