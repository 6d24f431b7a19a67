"""Clients come and go: register, fence, leave, exit, acknowledge, and what happens to what they held."""

import logging

from memsvc.core.limbo import Quarantine, Ward, release_all
from memsvc.core.pressure import Pressure
from memsvc.core.sessions import Client, Sessions
from memsvc.core.steps import Steps
from memsvc.core.store import PageStore
from memsvc.wire.base import Epoch
from memsvc.wire.mem import AckEpoch, Register

logger = logging.getLogger(__name__)


class Lifecycle:
    """Published pages outlive their client. Private ones wait until nobody can write to them."""

    def __init__(
        self, store: PageStore, sessions: Sessions, steps: Steps, pressure: Pressure, quarantine: Quarantine
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._steps = steps
        self._pressure = pressure
        self._quarantine = quarantine

    def register(self, msg: Register) -> Client:
        """A new client; one that had its place is fenced. Raises RequestError."""
        self._sessions.check(msg)
        engine = self._sessions.engines.get(msg.engine)
        if engine is not None and msg.role in engine.clients:
            self.fence(engine.clients[msg.role], "registered again")
        client = self._sessions.add(msg, self._store.now)
        logger.info("register engine=%s role=%s pid=%d epoch=%d", msg.engine, msg.role, msg.pid, client.epoch)
        return client

    def fence(self, client: Client, why: str) -> None:
        """End the client. Its requests close, and their private pages and its limbo go to quarantine."""
        logger.warning(
            "fence engine=%s role=%s epoch=%d reqs=%d why=%s",
            client.engine.name, client.role, client.epoch, len(client.engine.reqs), why,
        )  # fmt: skip
        self._sessions.fence(client)
        if client.role != "target":
            return
        waits_for = self._sessions.writers(client.engine, client)
        ward = Ward(
            engine=client.engine.name, epoch=client.epoch, pid=client.pid, since=self._store.now, waits_for=waits_for
        )
        for req in list(client.engine.reqs.values()):
            self._quarantine.admit(ward, self._steps.end(client, req, "fenced"))
        self._quarantine.admit(ward, [(kind, page) for _, kind, page in client.limbo])
        client.limbo.clear()
        self._quarantine.settle(ward)

    def leave(self, client: Client) -> None:
        """The client has nothing in flight and ends: what it held is free at once."""
        logger.info("leave engine=%s role=%s epoch=%d", client.engine.name, client.role, client.epoch)
        self._sessions.fence(client)
        if client.role == "target":
            for req in list(client.engine.reqs.values()):
                for kind, page in self._steps.end(client, req, "leave"):
                    self._store.pool.free(kind, page)
            release_all(self._store.pool, client)
        self._gone(client)

    def exited(self, epoch: Epoch) -> None:
        """The process behind epoch is gone and reaped; epochs that are gone already are ignored."""
        client = self._sessions.clients.get(epoch)
        if client is None:
            return
        if not client.fenced:
            self.fence(client, "exited")
        self._gone(client)

    def acknowledge(self, client: Client, msg: AckEpoch) -> None:
        """A co-writer has dropped the requests of older epochs."""
        self._quarantine.acknowledged(client, msg.fenced_before)

    def _gone(self, client: Client) -> None:
        self._sessions.forget(client)
        self._quarantine.gone(client.epoch)

    def expire(self) -> bool:
        """End what is past its time: remote clients' leases, and engines that did not give back in time."""
        now, ended = self._store.now, False
        for client in [c for c in self._sessions.clients.values() if not c.pid and c.lease_until <= now]:
            self.exited(client.epoch)
            ended = True
        for req in [req for req in self._pressure.wanted_back() if req.retract_at <= now]:
            target = req.engine.clients.get("target")
            if target is not None and req.engine.reqs.get(req.rid) is req:
                self.fence(target, f"kept rid {req.rid} past the retract deadline")
                ended = True
        return ended

    def next_due(self) -> float:
        """When expire() has something to do; infinity if never."""
        leases = [client.lease_until for client in self._sessions.clients.values() if not client.pid]
        return min([*leases, *(req.retract_at for req in self._pressure.wanted_back())], default=float("inf"))
