"""The scheduler of the pool benchmark: continuous batching with a simulated clock, one Step a forward.

Every forward takes STEP_S. In it each decoding request commits 4 tokens, and PREFILL_TOKENS of prompts
are computed in order of arrival. Requests are opened first come, first served, as soon as memory has
room, and retracted when it names them; a retracted one keeps its place in the order.
"""

import heapq
from dataclasses import dataclass, field
from typing import Any

from memsvc.wire.base import ReqId
from memsvc.wire.mem import OpenReq
from tests.bench.pool_loads import Job
from tests.bench.pool_memory import Admitted, Granted, Turn, UnifiedMemory
from tests.bench.pool_modes import BLOCK_SIZE, COMMITTED, MAX_EXTEND, MAX_RUNNING
from tests.bench.pool_record import Record

STEP_S = 0.03
PREFILL_TOKENS = 16_384
"""So many that memory is what limits the loads, and not the computation of prompts."""
AHEAD = 2 * BLOCK_SIZE
"""Slots past the committed length: the block in flight and the one after it."""
BLOCKED_STEPS = 16
"""After a refused open the next is tried when something closes, in the step after that, and every so many steps."""
MIN_STATE_TOKENS = 1024
"""While a request waits for memory, a state this near after the last stored one is not worth its bytes."""
MAX_TRIES = 64
"""Repetitions of a refused reservation in one step before the simulation is given up as stuck."""


@dataclass(slots=True, eq=False)
class Run:
    """A job on its way through the server."""

    job: Job
    rid: ReqId
    known: int
    """Tokens it is opened with: the prompt, and after a retraction what was generated too."""
    waits_since: float
    computed: int = 0
    told: int = 0
    told_tokens: int = 0
    slots: int = 0
    state_at: int = 0
    """Where the newest stored state of its path stands."""
    places: list[int] = field(default_factory=list)
    """Where a state is worth storing, the next one last."""
    next_computed: int = 0
    """Where the forward in flight takes it."""

    @property
    def is_done(self) -> bool:
        """The KV of the last token is never written."""
        return self.computed >= self.job.end_len - 1

    def tokens(self, first: int, last: int) -> bytes:
        """Packed tokens [first, last)."""
        return self.job.text[4 * first : 4 * last]


class Engine:
    """Serves jobs from a memory."""

    def __init__(self, memory: UnifiedMemory, jobs: list[Job], record: Record) -> None:
        self.memory = memory
        self.record = record
        self._jobs = jobs
        self._num_arrived = 0
        self._waiting: list[tuple[ReqId, Run]] = []
        """A heap by arrival."""
        self.running: dict[ReqId, Run] = {}
        """In order of opening."""
        self._opening: dict[ReqId, Run] = {}
        self._wants: list[tuple[Run, int]] = []
        """Whom the Step asks slots for, and up to which token."""
        self._is_full = False
        self._closed_before = 0
        self.refused = ""
        """Which pool refused the head of the waiting list when it was last asked for."""
        self.num_steps = 0

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and hold nothing."""
        return len(self._waiting)

    def step(self) -> None:
        """One forward, and the Step after it."""
        now = self.memory.now = self.num_steps * STEP_S
        self._arrive(now)
        for run in self.running.values():
            run.computed = run.next_computed
        turn = Turn()
        self._commit(turn)
        self._close([run for run in self.running.values() if run.is_done], "finish", turn)
        self._plan()
        self._reserve(turn)
        self._open(turn)
        self._apply(self.memory.send(turn), now)
        self.num_steps += 1
        self.record.step(self)

    def row(self) -> dict[str, Any]:
        """The record's figures, as of now."""
        now = self.num_steps * STEP_S
        still = sum(now - run.waits_since for _, run in self._waiting)
        return self.record.row(self, still, self._num_arrived)

    # --- arrivals ---

    def _arrive(self, now: float) -> None:
        while self._num_arrived < len(self._jobs) and self._jobs[self._num_arrived].arrival_s <= now:
            job = self._jobs[self._num_arrived]
            self._num_arrived += 1
            rid = ReqId(self._num_arrived)
            heapq.heappush(self._waiting, (rid, Run(job, rid, job.prompt_len, job.arrival_s)))
        if self._waiting and self._waiting[0][1].job.gives_up_s <= now:
            gone = [run for _, run in self._waiting if run.job.gives_up_s <= now]
            for run in gone:
                self.record.gave_up(run.job.gives_up_s - run.waits_since)
            self._waiting = [entry for entry in self._waiting if entry[1].job.gives_up_s > now]
            heapq.heapify(self._waiting)

    # --- one turn ---

    def _commit(self, turn: Turn) -> None:
        for rid, run in self.running.items():
            if run.places and run.places[-1] == run.computed:
                at = run.places.pop()
                if not self._is_full or at - run.state_at >= MIN_STATE_TOKENS:
                    turn.freezes.append((rid, at, run.job.text))
            if run.computed <= run.told:
                continue
            turn.rids.append(rid)
            turn.lens.append(run.computed)
            turn.tokens.append(run.tokens(run.told_tokens, run.computed) if run.computed > run.told_tokens else b"")
            run.told = run.computed
            run.told_tokens = max(run.told_tokens, run.computed)

    def _close(self, runs: list[Run], reason: str, turn: Turn) -> None:
        """Close, and give away the state at the last page boundary if none is stored there."""
        page = self.memory.page_size
        frozen = {rid for rid, _, _ in turn.freezes}
        for run in runs:
            turn.closes.setdefault(reason, []).append(run.rid)
            at = run.computed // page * page
            if at > run.state_at and run.rid not in frozen and at <= run.told:
                turn.freezes.append((run.rid, at, run.job.text))
            del self.running[run.rid]
            if reason == "finish":
                self.record.finished(run)

    def _plan(self) -> None:
        """What the next forward computes."""
        budget = PREFILL_TOKENS
        for run in self.running.values():
            if run.computed >= run.known:
                run.next_computed = min(run.computed + COMMITTED, run.job.end_len - 1)
                continue
            end = min(run.known, run.computed + min(budget, MAX_EXTEND))
            if run.places:
                end = min(end, run.places[-1])
            budget -= end - run.computed
            run.next_computed = end

    def _reserve(self, turn: Turn) -> None:
        self._wants = []
        for rid, run in self.running.items():
            decodes = run.computed >= run.known
            want = min(run.computed + AHEAD, run.job.end_len) if decodes else run.next_computed
            if want > run.slots:
                turn.reserve_rids.append(rid)
                turn.nums.append(want - run.told)
                self._wants.append((run, want))

    def _open(self, turn: Turn) -> None:
        free = MAX_RUNNING - len(self.running)
        closing = sum(len(rids) for rids in turn.closes.values())
        if self._is_full:
            # what closes is in limbo for this step and can be had in the next
            hopes = closing or self._closed_before or not self.running or not self.num_steps % BLOCKED_STEPS
            free = min(free, closing + 1) if hopes else 0
        self._closed_before = closing
        self._opening = {}
        while self._waiting and len(self._opening) < free:
            rid, run = heapq.heappop(self._waiting)
            self._opening[rid] = run
        turn.opens = [
            OpenReq(rid, run.tokens(0, run.known), run.job.end_len - run.known) for rid, run in self._opening.items()
        ]

    # --- the answer ---

    def _apply(self, granted: Granted, now: float) -> None:
        for rid in granted.frozen:
            if rid in self.running:
                self.running[rid].state_at = self.running[rid].computed
        for admitted in granted.admitted:
            self._admit(self._opening.pop(admitted.rid), admitted, now)
        for rid in granted.too_large:
            del self._opening[rid]
            self.record.num_too_large += 1
        for entry in self._opening.items():
            heapq.heappush(self._waiting, entry)
        if granted.refused or granted.admitted:
            self._is_full = bool(granted.refused)
            self.refused = granted.refused
        if granted.victims is not None:
            self._make_room(granted.victims, now)
        page = self.memory.page_size
        for run, want in self._wants:
            run.slots = -(-want // page) * page

    def _admit(self, run: Run, admitted: Admitted, now: float) -> None:
        run.computed = run.next_computed = run.state_at = admitted.hit_len
        run.told = admitted.kv_len
        run.told_tokens = run.known
        run.slots = admitted.kv_len
        run.places = admitted.places[::-1]
        self.running[run.rid] = run
        self.record.opened(run, admitted.hit_len, now - run.waits_since)

    def _make_room(self, victims: list[ReqId], now: float) -> None:
        """Retract whom memory names, and ask again, until the slots are there or nobody is left."""
        for _ in range(MAX_TRIES):
            if victims:
                turn = Turn()
                self._retract([self.running[rid] for rid in victims], now, turn)
                self.memory.send(turn)
            turn = Turn()
            self._reserve(turn)
            again = self.memory.send(turn).victims
            if again is None:
                return
            victims = again
        raise RuntimeError(f"no room for {len(self.running)} requests after {MAX_TRIES} tries")

    def _retract(self, runs: list[Run], now: float, turn: Turn) -> None:
        self._close(runs, "retract", turn)
        for run in runs:
            run.known = min(max(run.job.prompt_len, run.computed + 1), run.job.end_len)
            run.waits_since = now
            run.places = []
            heapq.heappush(self._waiting, (run.rid, run))
            self.record.num_retracts += 1
