"""Runs the processes of one server: carries out what the policy decides, until a signal or a failure ends it."""

import asyncio
import logging
import math
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import zmq
import zmq.asyncio

from launch.child import Child, ChildSpec, ending
from launch.policy import FRONT, Action, AllUp, DoWithout, GiveUp, Kill, Policy, Spawn, Stop, Tell
from launch.silence import LOOK_S, Loading, Silence
from memsvc.inbox import PullInbox
from memsvc.transport import bind, connect
from memsvc.wire.codec import encode
from memsvc.wire.control import Alive, Fatal, Ready, ToFront
from memsvc.wire.links import ALL_LAUNCH, LAUNCH_FRONT

logger = logging.getLogger(__name__)

STOP_ORDER = ("front", "tokenizer", "target", "draft", "memsvc")
LAST_WORDS_S = 0.3
"""How long a process that ended may still have a message on its way."""
RECOVERY_GRACE_S = 1.0
"""From SIGTERM to SIGKILL for a process that lost what it works on: it has nothing left to bring to an end."""

SpecOf = Callable[[str, int], ChildSpec]
"""(role, generation) -> how to start it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long processes are waited for."""

    ready_s: float
    """From the start of a process to its Ready."""
    hang_s: float
    """Without a sign of life of one that serves; it is killed then. 0 = for ever."""
    look_s: float = LOOK_S
    """Between two looks at who gave a sign of life."""


class Supervisor:
    """One per run. on_up is called when every process serves, at first and after a recovery."""

    def __init__(
        self, run_dir: Path, policy: Policy, spec_of: SpecOf, on_up: Callable[[AllUp], None], patience: Patience
    ) -> None:
        self._run_dir = run_dir
        self._policy = policy
        self._spec_of = spec_of
        self._on_up = on_up
        self._patience = patience
        self._silence = Silence(math.ceil(patience.hang_s / patience.look_s))
        self._loading = Loading()
        self._context = zmq.asyncio.Context()
        self._children: dict[str, Child] = {}
        self._ended: dict[str, asyncio.Event] = {}
        self._to_front: zmq.asyncio.Socket | None = None
        self.device_bytes: dict[str, int] = {}
        """By role, as the newest Ready of each has it."""
        self._finish = asyncio.Event()
        self._reason = ""
        self._num_signals = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> int:
        """Start everything and stay until a signal (0) or until it can't go on (1)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        listener = bind(self._context, ALL_LAUNCH, self._run_dir)
        loops = [asyncio.create_task(self._receive(listener)), asyncio.create_task(self._watch())]
        try:
            self._do(self._policy.start())
            await self._finish.wait()
            await self._stop_all()
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, *self._tasks, return_exceptions=True)
            self._context.destroy(linger=0)
        if self._reason:
            logger.critical("stopped: %s", self._reason)
        return 1 if self._reason else 0

    def _on_signal(self, number: int) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            logger.info("stopping on %s", signal.Signals(number).name)
            self._finish.set()
            return
        for child in self._children.values():
            child.kill()

    async def _receive(self, listener: zmq.asyncio.Socket) -> None:
        inbox = PullInbox(cast("zmq.Socket[bytes]", listener), ALL_LAUNCH)
        while True:
            match inbox.decode(await listener.recv_multipart()):
                case Ready(role, pid, lines, device_bytes) if self._is_current(role, pid):
                    self.device_bytes[role] = device_bytes
                    # The memory service repeats the plan, which was printed before anything was started.
                    level = logging.DEBUG if role == "memsvc" else logging.INFO
                    for line in lines:
                        logger.log(level, "%s: %s", role, line)
                    self._loading.end(role)
                    self._silence.heard(role)
                    self._do(self._policy.on_ready(role))
                case Fatal(role, pid, message) if self._is_current(role, pid):
                    self._do(self._policy.on_fatal(role, message))
                case Alive(role, pid) if self._is_current(role, pid):
                    if self._silence.heard(role):
                        logger.info("alive again role=%s pid=%d", role, pid)
                        self._do(self._policy.on_heard(role))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._patience.look_s)
            for role, looks in self._loading.look():
                seconds = looks * self._patience.look_s
                logger.info("still starting role=%s pid=%d seconds=%.0f", role, self._children[role].pid, seconds)
            silent, hanging = self._silence.look()
            for role in silent:
                logger.warning("no sign of life role=%s pid=%d", role, self._children[role].pid)
                self._do(self._policy.on_silent(role))
            for role in hanging:
                self._do(self._policy.on_hang(role))

    def _is_current(self, role: str, pid: int) -> bool:
        return role in self._children and self._children[role].pid == pid

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if self._finish.is_set():
                return
            match action:
                case Spawn(role, generation):
                    self._spawn(role, generation)
                case Stop(role):
                    self._terminate(self._children[role], RECOVERY_GRACE_S)
                case Kill(role):
                    self._kill_hanging(self._children[role])
                case Tell(msg):
                    self._tell(msg)
                case AllUp():
                    self._on_up(action)
                case DoWithout(role, reason):
                    logger.error("serving without %s until the next start of the server: %s", role, reason)
                case GiveUp(reason):
                    self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._finish.set()

    def _spawn(self, role: str, generation: int) -> None:
        if role == FRONT:
            # A new socket: what the old front did not read must not reach the new one.
            if self._to_front is not None:
                self._to_front.close()
            self._to_front = connect(self._context, LAUNCH_FRONT, self._run_dir)
        try:
            child = Child(role, self._spec_of(role, generation))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._give_up(f"{role}: cannot be started: {error}")
            return
        logger.info("start role=%s pid=%d generation=%d", role, child.pid, generation)
        self._children[role] = child
        self._loading.begin(role)
        self._ended[role] = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(child.fd, self._on_readable, child)
        limit_s = self._patience.ready_s
        loop.call_later(limit_s, lambda: self._do(self._policy.on_late(role, generation, limit_s)))

    def _on_readable(self, child: Child) -> None:
        asyncio.get_running_loop().remove_reader(child.fd)
        task = asyncio.create_task(self._on_end(child))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_end(self, child: Child) -> None:
        status = child.reap()
        how = ending(status)
        level = logging.WARNING if status and not self._finish.is_set() else logging.INFO
        logger.log(level, "end role=%s pid=%d how=%s", child.role, child.pid, how)
        if status > 0 and not self._finish.is_set():
            # Its Fatal says more than its status, and may not have been read yet.
            await asyncio.sleep(LAST_WORDS_S)
        del self._children[child.role]
        self._loading.end(child.role)
        self._silence.end(child.role)
        self._ended[child.role].set()
        self._do(self._policy.on_end(child.role, how, time.monotonic()))

    def _kill_hanging(self, child: Child) -> None:
        logger.error("hangs role=%s pid=%d: killing it", child.role, child.pid)
        self._silence.end(child.role)
        child.kill()

    def _terminate(self, child: Child, grace_s: float) -> None:
        self._silence.end(child.role)
        child.terminate()
        asyncio.get_running_loop().call_later(grace_s, self._kill, child, grace_s)

    def _kill(self, child: Child, grace_s: float) -> None:
        if self._children.get(child.role) is child:
            logger.warning("kill role=%s pid=%d after=%gs", child.role, child.pid, grace_s)
            child.kill()

    def _tell(self, msg: ToFront) -> None:
        if self._to_front is not None:
            self._to_front.send(encode(msg))

    async def _stop_all(self) -> None:
        for role in STOP_ORDER:
            child = self._children.get(role)
            if child is not None:
                self._terminate(child, child.grace_s)
                await self._ended[role].wait()
