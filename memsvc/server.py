"""The service's loop: one thread, one poll, every request answered before the next is read.

A plain blocking poll instead of an event loop: there is one hot socket, and docs/decisions.md has
the figures of both.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import zmq

from memsvc.arena import ArenaMemory, ArenaSocket
from memsvc.inbox import RouterInbox
from memsvc.leases import ClientWatch
from memsvc.outline import MAX_CHARS, outline, trace
from memsvc.process import StopFlag
from memsvc.transport import arena_path, bind
from memsvc.wire.admin import AdminRequest, Stats
from memsvc.wire.base import BadRequest, Done, Epoch, Msg
from memsvc.wire.links import MEM, MEM_ADMIN, Link
from memsvc.wire.mem import Leave, MemRequest, Register, Registered

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


class ManagerBug(Exception):
    """The memory manager failed on the call in the text, tokens left out; its state can't be trusted any more."""


class Manager(Protocol):
    """What the loop needs of the memory manager; it does no I/O and raises only on a bug of its own."""

    def handle(self, msg: MemRequest) -> Msg:
        """Answer a worker."""
        ...

    def handle_admin(self, msg: AdminRequest) -> Msg:
        """Answer an administrator."""
        ...

    def client_exited(self, epoch: Epoch) -> None:
        """The process behind a registration has ended."""
        ...

    def tick(self) -> float:
        """Do what is due (leases, idle check); returns seconds until it wants to be called again."""
        ...


def serve(manager: Manager, arena: ArenaMemory, run_dir: Path, stop: StopFlag, on_ready: Callable[[], None]) -> None:
    """Serve until stop is set. on_ready is called once everything is bound.

    Raises ValueError if another service holds run_dir, zmq.ZMQError or OSError if it can't be bound,
    ManagerBug, and what the arena's check raises.
    """
    with ExitStack() as stack:
        _lock_run_dir(run_dir, stack)
        context = stack.enter_context(zmq.Context())
        mem, admin = (_bind_inbox(context, link, run_dir, stack) for link in (MEM, MEM_ADMIN))
        watch = ClientWatch()
        stack.callback(watch.close)
        arena_socket = ArenaSocket(arena_path(run_dir), arena)
        stack.callback(arena_socket.close)
        loop = _Loop(manager, mem, admin, watch)
        on_ready()
        loop.run(arena_socket, stop)


def _bind_inbox(context: zmq.Context[zmq.Socket[bytes]], link: Link, run_dir: Path, stack: ExitStack) -> RouterInbox:
    # libzmq leaves the file of a closed socket behind.
    stack.callback((run_dir / f"{link.name}.sock").unlink, missing_ok=True)
    return RouterInbox(stack.enter_context(bind(context, link, run_dir)), link)


def _lock_run_dir(run_dir: Path, stack: ExitStack) -> None:
    # Binding takes over the socket files of a killed service; the lock, which the kernel drops with
    # its holder, tells such files from those of a living one.
    fd = os.open(run_dir / "mem.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another memory service runs in {run_dir}") from None


class _Loop:
    def __init__(self, manager: Manager, mem: RouterInbox, admin: RouterInbox, watch: ClientWatch) -> None:
        self._manager = manager
        self._mem = mem
        self._admin = admin
        self._watch = watch

    def run(self, arena_socket: ArenaSocket, stop: StopFlag) -> None:
        handlers: dict[Any, Callable[[], None]] = {
            self._mem.socket: self._serve_workers,
            self._admin.socket: self._serve_admin,
            self._watch.fileno(): self._bury,
            arena_socket.fileno(): arena_socket.accept_one,
            stop.fd: lambda: None,
        }
        sources = [(source, zmq.POLLIN) for source in handlers]
        next_tick = time.monotonic()
        while not stop.is_set:
            wait_s = next_tick - time.monotonic()
            for source, _ in zmq.zmq_poll(sources, max(0, 1 + int(wait_s * 1000))):
                handlers[source]()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + self._checked(self._manager.tick)

    def _serve_workers(self) -> None:
        # One request a poll: a second look at an empty socket costs more than the poll does.
        request = self._mem.recv()
        if request is not None:
            address, msg = request
            self._mem.reply(address, self._answer_worker(msg))

    def _answer_worker(self, msg: MemRequest) -> Msg:
        if isinstance(msg, Register):
            return self._register(msg)
        reply = self._checked(self._manager.handle, msg)
        if isinstance(msg, Leave) and isinstance(reply, Done):
            self._watch.forget(msg.epoch)
        return reply

    def _register(self, msg: Register) -> Msg:
        if msg.pid == 0:
            return self._checked(self._manager.handle, msg)
        # Opened before anything is registered, so a process that is gone never gets a lease.
        pidfd = self._watch.open(msg.pid)
        if pidfd is None:
            return BadRequest(f"pid {msg.pid} is no running process here")
        reply = self._checked(self._manager.handle, msg)
        if isinstance(reply, Registered):
            self._watch.add(pidfd, reply.epoch)
        else:
            self._watch.release(pidfd)
        return reply

    def _serve_admin(self) -> None:
        request = self._admin.recv()
        if request is None:
            return
        address, msg = request
        reply: Msg = self._checked(self._manager.handle_admin, msg)
        if isinstance(reply, Stats):
            num = self._mem.bad_frames.num + self._admin.bad_frames.num
            reply = msgspec.structs.replace(reply, num_bad_frames=num)
        self._admin.reply(address, reply)

    def _bury(self) -> None:
        for epoch in self._watch.take_ended():
            logger.info("client ended epoch=%d", epoch)
            self._checked(self._manager.client_exited, epoch)

    def _checked(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        try:
            return call(*arguments)
        except Exception as error:
            given = ", ".join(map(outline, arguments))
            raise ManagerBug(f"{call.__name__}({given:.{MAX_CHARS}}): {trace(error)}") from error
