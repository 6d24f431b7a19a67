"""Clients and engines: registration, epochs, numbered steps with their last replies, leases."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from memsvc.core.errors import RequestError
from memsvc.core.kinds import KindTable
from memsvc.core.radix import Checkpoint
from memsvc.core.reqs import Req
from memsvc.wire.base import WIRE_VERSION, Epoch, ReqId
from memsvc.wire.mem import Register, Step, Stepped

REPLIES_KEPT: Final = 4
ROLES: Final = ("target", "draft")


@dataclass(kw_only=True, slots=True, eq=False)
class Client:
    """One registration. It is fenced once, and gone once its process can touch nothing any more."""

    epoch: Epoch
    engine: "Engine"
    role: str
    pid: int
    """0 is a remote client: it is gone when its lease ends."""
    lease_until: float
    fenced: bool = False
    last_num: int = 0
    done_step: int = 0
    replies: deque[Stepped] = field(default_factory=lambda: deque(maxlen=REPLIES_KEPT))
    limbo: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(step, kind, page) of pages freed by a step, oldest first."""
    leaving: deque[tuple[int, Req, Checkpoint]] = field(default_factory=deque)
    """(step, request, checkpoint it still locks) of those that a step has let go of, oldest first."""


@dataclass(kw_only=True, slots=True, eq=False)
class Engine:
    """A target, its draft, and the target's requests. It outlives its clients, so the cache stays warm."""

    name: str
    fingerprint: str = ""
    """Of the target's model: which trees it reads."""
    draft_fingerprint: str = ""
    kinds: set[int] = field(default_factory=set)
    """What its clients have ever registered: the kinds its requests hold pages of."""
    clients: dict[str, Client] = field(default_factory=dict)
    """Live clients by role."""
    reqs: dict[ReqId, Req] = field(default_factory=dict)
    incomplete: set[ReqId] = field(default_factory=set)
    """Requests with missing draft pages."""

    @property
    def aux_label(self) -> str:
        """Whose draft pages it can use."""
        return self.draft_fingerprint or self.fingerprint


class Sessions:
    """All registrations. Epochs rise by one; an epoch that is not live is fenced."""

    def __init__(self, kinds: KindTable, lease_s: float, first_epoch: int) -> None:
        self._kinds = kinds
        self._lease_s = lease_s
        self._next_epoch = first_epoch
        self.engines: dict[str, Engine] = {}
        self.clients: dict[Epoch, Client] = {}
        """Every client that is not gone, live or fenced."""

    def live(self, epoch: Epoch, now: float) -> Client | None:
        """The client, its lease renewed, or None if it is fenced. Raises RequestError for an epoch never given out."""
        client = self.clients.get(epoch)
        if client is not None and not client.fenced:
            client.lease_until = now + self._lease_s
            return client
        if not 0 < epoch < self._next_epoch:
            raise RequestError(f"epoch {epoch} was never given out; register first")
        return None

    def check(self, msg: Register) -> None:
        """Raise RequestError if this client can't be served."""
        if msg.wire_version != WIRE_VERSION:
            raise RequestError(f"wire version {msg.wire_version}, this service speaks {WIRE_VERSION}")
        if msg.role not in ROLES:
            raise RequestError(f"role {msg.role!r}, must be one of {ROLES}")
        unknown = [name for name in msg.kinds if name not in self._kinds.names]
        if unknown:
            sizes = dict(zip(self._kinds.names, self._kinds.pages_per_frame, strict=True))
            raise RequestError(f"kinds {unknown} are not of this pool, which has (pages a frame) {sizes}")
        primary = self._kinds.names[self._kinds.primary]
        if msg.role == "target" and primary not in msg.kinds:
            raise RequestError(f"a target must use kind {primary!r}, got {msg.kinds}")

    def add(self, msg: Register, now: float) -> Client:
        """A new live client. The caller has fenced the one it replaces."""
        engine = self.engines.setdefault(msg.engine, Engine(name=msg.engine))
        engine.kinds.update(self._kinds.index(name) for name in msg.kinds)
        if msg.role == "target":
            engine.fingerprint = msg.model_fingerprint
        else:
            engine.draft_fingerprint = msg.model_fingerprint
        epoch = Epoch(self._next_epoch)
        self._next_epoch += 1
        client = Client(epoch=epoch, engine=engine, role=msg.role, pid=msg.pid, lease_until=now + self._lease_s)
        self.clients[epoch] = engine.clients[msg.role] = client
        return client

    def fence(self, client: Client) -> None:
        """No message of this client is carried out any more."""
        client.fenced = True
        client.engine.clients.pop(client.role, None)
        client.replies.clear()

    def forget(self, client: Client) -> None:
        """The client is gone."""
        self.clients.pop(client.epoch, None)

    def writers(self, engine: Engine, target: Client) -> set[Epoch]:
        """Epochs that may still touch private pages of the target's requests: itself and its engine's drafts."""
        drafts = {c.epoch for c in self.clients.values() if c.engine is engine and c.role == "draft"}
        return drafts | {target.epoch}


def repeated(client: Client, msg: Step) -> Stepped | None:
    """The reply to a step that was handled already, None for the next one. Raises RequestError on a gap."""
    if msg.num == client.last_num + 1:
        return None
    for reply in client.replies:
        if reply.num == msg.num:
            return reply
    raise RequestError(
        f"step {msg.num} after step {client.last_num}: numbers are consecutive, "
        f"and only the last {REPLIES_KEPT} replies are kept"
    )
