"""Workers that obey: they reserve, commit, freeze, retract when asked, and take every request to its end."""

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Any

from memsvc.wire.base import Epoch, ReqId, pack_tokens
from memsvc.wire.mem import Close, Commit, Opened, OpenReq, Reserve, Stepped, TooLarge
from tests.support.mem_model import ModelEngine

SLACK = 4
BLOCK = 2
CHUNK = 6
LAG = 2
UNTIL_REAPED = 1 << 40


@dataclass
class Job:
    """A request over all its retractions."""

    rid: int
    tokens: list[int]
    total: int
    salt: str
    priority: int


def make_jobs(dice: Random, first_rid: int, num: int, longest: int) -> list[Job]:
    """Prompts of which many share their beginning."""
    jobs, texts = [], [[dice.randint(0, 1) for _ in range(longest)] for _ in range(2)]
    for rid in range(first_rid, first_rid + num):
        shared = dice.choice(texts)[: dice.randint(0, longest // 2)]
        prompt = shared + [dice.randint(0, 1) for _ in range(dice.randint(1, 4))]
        total = len(prompt) + dice.randint(1, longest)
        jobs.append(Job(rid, prompt, total, dice.choice(["", "", "s"]), dice.randint(0, 1)))
    return jobs


class Worker(ModelEngine):
    """Reserves for all that runs, commits what it got, closes victims, opens what waits: as a scheduler does.

    A recurrent one freezes whatever state it can, at every step.
    """

    at_once = False
    """Whether victims are closed before anything else is done."""

    def begin(self, dice: Random, jobs: list[Job]) -> None:
        """Nothing runs yet, all jobs wait."""
        self.dice = dice
        self.waiting = deque(jobs)
        self.jobs: dict[int, Job] = {}
        self.victims: list[int] = []
        self.granted: set[int] = set()
        self.asked: Reserve | None = None
        self.num_obeyed = self.num_done = self.num_refused = self.num_retracted = self.num_last_rung = 0
        self.num_killed = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.jobs)

    # --- being refused ---

    def obey_at_once(self, reply: Stepped) -> Stepped:
        """Close the victims, let everything in flight end, and ask for the rest again: it must fit."""
        assert reply.no_room is not None
        self.num_obeyed += 1
        self.give_back(reply.no_room.victims)
        return self.ask_again()

    def give_back(self, rids: list[ReqId]) -> list[ReqId]:
        """Retract these, then let everything in flight end. Returns what the service wants back beside them."""
        self.victims = list(rids)
        parts: dict[str, Any] = {}
        self.freeze_all(parts)
        self.close_some(parts)
        self.apply(self.step(done_step=self.done, **parts))
        self.done = self.num
        reply = self.step(done_step=self.done)
        self.apply(reply)
        self.done = self.num
        return reply.retract

    def ask_again(self) -> Stepped:
        """What was refused, as far as it still runs; everything in flight has ended. It must be granted."""
        assert self.asked is not None
        rest = [(rid, num) for rid, num in zip(self.asked.rids, self.asked.nums, strict=True) if rid in self.reqs]
        again = Reserve(rids=[rid for rid, _ in rest], nums=[num for _, num in rest])
        reply = self.step(done_step=self.done, reserve=again)
        assert reply.no_room is None, reply.no_room
        self.apply(reply)
        self.granted = set(self.reqs)
        return reply

    # --- a turn ---

    def turn(self) -> Stepped:
        """One scheduler step."""
        parts: dict[str, Any] = {}
        self.commit_granted(parts)
        self.freeze_all(parts)
        self.close_some(parts)
        self.reserve_all(parts)
        opens = self.open_some(parts)
        self.done = max(self.done, self.num - self.dice.randint(0, LAG))
        self.scribble()
        reply = self.step(done_step=self.done, **parts)
        self.take(reply)
        self.take_opened(opens, reply)
        self.launch(reply)
        self.victims = list(reply.retract)
        if reply.no_room is None:
            self.granted = set(self.reqs)
            return reply
        assert reply.no_room.victims or reply.no_room.waiting_on, reply.no_room
        assert reply.no_room.waiting_on in ("", "limbo", "quarantine", "other engine")
        if self.at_once and reply.no_room.victims and reply.no_room.waiting_on == "":
            return self.obey_at_once(reply)
        self.victims += reply.no_room.victims
        return reply

    def commit_granted(self, parts: dict[str, Any]) -> None:
        """Random progress of what has slots."""
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

    def freeze_all(self, parts: dict[str, Any]) -> None:
        """Every state that stands past the one it came from, also of requests that are about to close."""
        rids = [rid for rid, req in self.reqs.items() if req.state.can_freeze]
        if rids:
            parts["freeze"] = self.freeze_part(rids)

    def close_some(self, parts: dict[str, Any]) -> None:
        """What has ended, and what has to give way. States were frozen before."""
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
            self.requeue(rid)
            self.num_retracted += 1

    def requeue(self, rid: int) -> None:
        """It starts again from what it has."""
        job = self.jobs.pop(rid)
        job.tokens = self.closed_req(rid).tokens
        self.waiting.appendleft(job)

    def reserve_all(self, parts: dict[str, Any]) -> None:
        """The next chunk or block of everything."""
        rids = list(self.reqs)
        nums = []
        for rid in rids:
            req = self.reqs[rid]
            rest = len(req.tokens) - req.target_len
            nums.append(min(CHUNK, rest if rest > BLOCK else 2 * BLOCK, self.jobs[rid].total + SLACK - req.target_len))
        self.asked = Reserve(rids=[ReqId(rid) for rid in rids], nums=nums)
        if rids:
            parts["reserve"] = self.asked

    def open_some(self, parts: dict[str, Any]) -> list[tuple[Job, OpenReq]]:
        """The first that wait."""
        opens = []
        for job in list(self.waiting)[: self.dice.randint(1, 3)]:
            tokens, max_new = pack_tokens(job.tokens), job.total - len(job.tokens)
            op = OpenReq(rid=ReqId(job.rid), tokens=tokens, max_new=max_new, salt=job.salt, priority=job.priority)
            opens.append((job, op))
        parts["opens"] = [op for _, op in opens]
        return opens

    def take_opened(self, opens: list[tuple[Job, OpenReq]], reply: Stepped) -> None:
        """What was admitted runs now."""
        for (job, op), answer in zip(opens, reply.opened, strict=False):
            assert self.waiting.popleft() is job
            if isinstance(answer, TooLarge):
                self.num_refused += 1
                continue
            assert isinstance(answer, Opened)
            self.opened(answer, job.tokens, job.total + SLACK, op.salt)
            self.jobs[job.rid] = job

    # --- dying ---

    def die(self) -> Epoch:
        """A new process takes the place; the old one goes on writing until it is reaped. Returns the old epoch."""
        old = self.epoch
        for rid in list(reversed(self.reqs)):
            self.requeue(rid)
        self.victims, self.granted, self.asked = [], set(), None
        for flight in self.flights:
            flight.step = UNTIL_REAPED
        self.pid += 10
        self.num_killed += 1
        self.register()
        self.scribble()
        return old

    def reaped(self) -> None:
        """No older process of this worker is left."""
        self.flights = [flight for flight in self.flights if flight.step != UNTIL_REAPED]
