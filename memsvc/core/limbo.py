"""Pages on their way back: limbo (a step in flight may touch them) and quarantine (their writer may live)."""

from dataclasses import dataclass, field

from memsvc.core.frames import FramePool
from memsvc.core.page_states import LIMBO, QUARANTINE
from memsvc.core.reqs import Req
from memsvc.core.sessions import Client
from memsvc.core.store import PageStore
from memsvc.wire.base import Epoch


def retire(pool: FramePool, client: Client, kind: int, page: int) -> None:
    """A private page is given up by the client's step last_num; it is free once that step is done."""
    pool.set_state(kind, page, LIMBO)
    client.limbo.append((client.last_num, kind, page))


def release_done(store: PageStore, client: Client) -> None:
    """Free the client's pages, and unlock the checkpoints, of steps up to done_step."""
    limbo, leaving, done = client.limbo, client.leaving, client.done_step
    while limbo and limbo[0][0] <= done:
        _, kind, page = limbo.popleft()
        store.pool.free(kind, page)
    while leaving and leaving[0][0] <= done:
        store.unlock_checkpoint(leaving.popleft()[2])


def let_go_now(store: PageStore, client: Client, req: Req) -> None:
    """The request is closed, so nothing in flight names it: unlock every checkpoint it holds."""
    if req.state_in is not None:
        store.unlock_checkpoint(req.state_in)
        req.state_in = None
    if client.leaving:
        for entry in [entry for entry in client.leaving if entry[1] is req]:
            client.leaving.remove(entry)
            store.unlock_checkpoint(entry[2])


def release_all(pool: FramePool, client: Client) -> None:
    """Free all of the client's pages in limbo: it says that nothing is in flight."""
    while client.limbo:
        _, kind, page = client.limbo.popleft()
        pool.free(kind, page)


@dataclass(kw_only=True, slots=True, eq=False)
class Ward:
    """Pages of one fenced target, and the epochs that may still write to them."""

    engine: str
    epoch: Epoch
    pid: int
    since: float
    waits_for: set[Epoch]
    pages: list[tuple[int, int]] = field(default_factory=list)


class Quarantine:
    """Pages whose owner was fenced. They are free once every possible writer is gone or has acknowledged."""

    def __init__(self, pool: FramePool) -> None:
        self._pool = pool
        self.wards: list[Ward] = []

    def admit(self, ward: Ward, pages: list[tuple[int, int]]) -> None:
        """Take blocked pages (kind, page) into a ward; call settle() after the last.

        The dead client may not have cleared them, so whoever takes them next is told to.
        """
        self._pool.unsure.update(pages)
        for kind, page in pages:
            self._pool.set_state(kind, page, QUARANTINE)
        ward.pages += pages

    def settle(self, ward: Ward) -> None:
        """The ward is complete: keep it, or free it if nobody is waited for."""
        self.wards.append(ward)
        self._discharge()

    def gone(self, epoch: Epoch) -> None:
        """This client's process is gone."""
        for ward in self.wards:
            ward.waits_for.discard(epoch)
        self._discharge()

    def acknowledged(self, client: Client, fenced_before: Epoch) -> None:
        """The client touches no page of its engine's epochs before fenced_before any more."""
        for ward in self.wards:
            if ward.engine == client.engine.name and ward.epoch < fenced_before:
                ward.waits_for.discard(client.epoch)
                # a process that registered again speaks for its own older epoch too
                if client.pid and client.pid == ward.pid:
                    ward.waits_for.discard(ward.epoch)
        self._discharge()

    def _discharge(self) -> None:
        for ward in self.wards:
            if not ward.waits_for:
                for kind, page in ward.pages:
                    self._pool.free(kind, page)
        self.wards = [ward for ward in self.wards if ward.waits_for]
