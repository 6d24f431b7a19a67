"""MemoryManager: the allocator's one door. Messages in, messages out, no I/O."""

import logging
import time
from collections.abc import Callable, Iterator

from memsvc.core.admin import Admin
from memsvc.core.check import Checker
from memsvc.core.config import PoolConfig
from memsvc.core.errors import RequestError
from memsvc.core.frames import FramePool
from memsvc.core.geometry import exchange_frames, fixed_frames, make_layout, plan_lines, shared_frames, solve
from memsvc.core.kinds import kind_table
from memsvc.core.ledger import Ledger
from memsvc.core.lifecycle import Lifecycle
from memsvc.core.limbo import Quarantine
from memsvc.core.pins import Pins
from memsvc.core.pressure import Pressure
from memsvc.core.reqs import Running
from memsvc.core.sessions import Client, Sessions, repeated
from memsvc.core.stats import kind_stats, unusable_bytes
from memsvc.core.steps import Steps
from memsvc.core.store import PageStore
from memsvc.wire.admin import (
    AdminReply,
    AdminRequest,
    Check,
    CheckReport,
    Evict,
    Flush,
    GetStats,
    Match,
    Pin,
    Snapshot,
    Stats,
    Unpin,
)
from memsvc.wire.base import BadRequest, Done, Epoch
from memsvc.wire.mem import AckEpoch, Fenced, Layout, Leave, MemReply, MemRequest, Register, Registered, Renew, Step

logger = logging.getLogger(__name__)

SLICE_S = 0.002
"""Length of one slice of the idle check."""
SLICE_GAP_S = 0.02
"""Pause between two slices."""


class MemoryManager:
    """Owns every page. A client is known by the epoch in its messages.

    Raises ValueError, naming the smallest arena that works, if config's does not.
    """

    layout: Layout

    def __init__(self, config: PoolConfig, clock: Callable[[], float] = time.monotonic, first_epoch: int = 1) -> None:
        """first_epoch must be above every epoch of an earlier service, so that its clients are fenced."""
        self._config = config
        self._clock = clock
        self._geometry = solve(config.kinds)
        self.layout = make_layout(config, self._geometry)
        kinds = kind_table(config, self.layout)
        first_frame = fixed_frames(config, self.layout.frame_bytes)
        pool = FramePool(kinds.pages_per_frame, self.layout.num_frames, first_frame)
        self._store = PageStore(kinds, pool, config.eviction_policy)
        self._running = Running()
        self._sessions = Sessions(kinds, config.lease_ms / 1000, first_epoch)
        self._quarantine = Quarantine(pool)
        ledger = Ledger(config, kinds, self._store, self._running)
        self._pressure = Pressure(self._store, ledger, self._running, self._sessions, self._quarantine)
        self._steps = Steps(config, self._store, ledger, self._running, self._pressure)
        self._lifecycle = Lifecycle(self._store, self._sessions, self._steps, self._pressure, self._quarantine)
        self._pins = Pins(self._store, ledger, config.pin_budget_frames)
        self._admin = Admin(self._store, self._running, self._pins)
        self._step_seconds = 0.0
        self._changed_at = self._clock()
        self._walk: Iterator[None] | None = None
        self._checker: Checker | None = None
        self._checked = True

    def handle(self, msg: MemRequest) -> MemReply:
        """Carry out a worker's message."""
        began = time.perf_counter()
        self._store.now = self._clock()
        try:
            reply = self._dispatch(msg)
        except RequestError as error:
            return BadRequest(str(error))
        if isinstance(msg, Step):
            self._step_seconds += time.perf_counter() - began
        return reply

    def _dispatch(self, msg: MemRequest) -> MemReply:
        if not isinstance(msg, Renew):
            self._touch()
        if isinstance(msg, Register):
            return self._register(msg)
        client = self._sessions.live(msg.epoch, self._store.now)
        if client is None:
            return Fenced(msg.epoch)
        match msg:
            case Step():
                return repeated(client, msg) or self._steps.handle(client, msg)
            case Renew():
                return Done()
            case Leave():
                self._lifecycle.leave(client)
                return Done()
            case AckEpoch():
                self._lifecycle.acknowledge(client, msg)
                return Done()

    def _register(self, msg: Register) -> Registered:
        client: Client = self._lifecycle.register(msg)
        return Registered(
            epoch=client.epoch,
            layout=self.layout,
            lease_ms=self._config.lease_ms,
            fd_endpoint=self._config.fd_endpoint,
        )

    def handle_admin(self, msg: AdminRequest) -> AdminReply:
        """Carry out an operator's message."""
        self._store.now = self._clock()
        if isinstance(msg, Pin | Unpin | Flush | Evict):
            self._touch()
        try:
            return self._dispatch_admin(msg)
        except RequestError as error:
            return BadRequest(str(error))

    def _dispatch_admin(self, msg: AdminRequest) -> AdminReply:
        match msg:
            case Match():
                return self._admin.match(msg)
            case Pin():
                return self._admin.pin(msg)
            case Unpin():
                self._pins.unpin(msg.name)
                return Done()
            case Flush():
                self._admin.flush()
                return Done()
            case Evict():
                return self._admin.evict(msg)
            case GetStats():
                return self.stats()
            case Check():
                return self._new_checker().run()
            case Snapshot():
                return self._admin.snapshot()

    def client_exited(self, epoch: Epoch) -> None:
        """The process behind epoch is gone and reaped. Also needed for epochs that are fenced already."""
        self._store.now = self._clock()
        self._touch()
        self._lifecycle.exited(epoch)

    def tick(self) -> float:
        """Do what is due: leases, pins, deadlines, a slice of the idle check. Returns seconds until the next call."""
        now = self._store.now = self._clock()
        if self._lifecycle.expire() | self._pins.expire() | self._expire_text():
            self._touch()
        due = min(self._lifecycle.next_due(), self._pins.next_due(), self._next_text_due())
        idle = now - self._changed_at
        if self._checked:
            return max(0.0, min(due - now, self._config.idle_check_s))
        if idle < self._config.idle_check_s:
            return max(0.0, min(due - now, self._config.idle_check_s - idle))
        self._check_slice()
        return max(0.0, min(due - now, SLICE_GAP_S))

    def _next_text_due(self) -> float:
        first = self._store.queue.first() if self._config.eviction_policy == "ttl" else None
        return first.key[0] + self._config.ttl_s if first is not None else float("inf")

    def _expire_text(self) -> bool:
        """Policy ttl: what nobody came back for goes."""
        return self._config.eviction_policy == "ttl" and self._store.expire(self._store.now - self._config.ttl_s)

    def _check_slice(self) -> None:
        if self._checker is None or self._walk is None:
            self._checker = self._new_checker()
            self._walk = self._checker.walk()
        until = self._clock() + SLICE_S
        for _ in self._walk:
            if self._clock() >= until:
                return
        self._log_problems(self._checker.report())
        self._walk = self._checker = None
        self._checked = True

    def _log_problems(self, report: CheckReport) -> None:
        for problem in report.problems:
            logger.error(
                "check kind=%s page=%d state=%s owner=%s age_s=%.1f what=%s",
                problem.kind, problem.page, problem.state, problem.owner, problem.age_s, problem.what,
            )  # fmt: skip

    def _new_checker(self) -> Checker:
        return Checker(self._store, self._running, self._sessions, self._quarantine, self._pins)

    def _touch(self) -> None:
        """Something may change: the idle check starts anew."""
        self._changed_at = self._store.now
        self._walk = self._checker = None
        self._checked = False

    def plan_lines(self) -> list[str]:
        """The geometry as an operator reads it at start."""
        return plan_lines(self._config, self._geometry, self.layout)

    def stats(self) -> Stats:
        """Counters since start and the arena now."""
        pool, elder, opening, steps = self._store.pool, self._running.elder, self._steps.opening, self._steps
        return Stats(
            num_frames=pool.num_frames,
            frame_bytes=self.layout.frame_bytes,
            frames_dummy=1,
            frames_exchange=exchange_frames(self._config, self.layout.frame_bytes),
            frames_empty=len(pool.empty),
            kinds=kind_stats(self._store),
            num_reqs=len(self._running),
            elder=elder.rid if elder else 0,
            num_clients=sum(1 for client in self._sessions.clients.values() if not client.fenced),
            hit_tokens=opening.hit_tokens,
            queried_tokens=opening.queried_tokens,
            draft_hit_short=opening.draft_hit_short,
            evicted_pages=list(self._store.num_evicted),
            num_opens=opening.num_opens,
            num_closes=dict(steps.num_closes),
            num_no_room=steps.num_no_room,
            num_too_large=opening.num_too_large,
            num_steps=steps.num_steps,
            step_seconds=self._step_seconds,
            unusable_bytes=unusable_bytes(self._store),
            num_checkpoints=self._store.num_checkpoints,
            num_frozen=steps.checkpoints.num_frozen,
            num_freeze_skipped=steps.checkpoints.num_skipped,
            num_thinned=steps.checkpoints.num_thinned,
            state_short_tokens=opening.state_short_tokens,
            frames_shared=shared_frames(self._config, self.layout.frame_bytes),
        )
