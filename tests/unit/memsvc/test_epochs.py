"""Epochs over the life of several services at one place."""

from memsvc.core.config import PoolConfig
from memsvc.core.manager import MemoryManager
from memsvc.wire.base import WIRE_VERSION, BadRequest, Epoch
from memsvc.wire.mem import Fenced, KindSpec, Leave, Register, Registered, Renew


def manager(first_epoch: int) -> MemoryManager:
    """A small service that started at that epoch."""
    config = PoolConfig(arena_bytes=1 << 20, page_size=4, kinds=[KindSpec("target_kv", 1024, 4)])
    return MemoryManager(config, first_epoch=first_epoch)


def test_a_client_of_an_earlier_service_is_fenced_and_harms_nobody() -> None:
    service = manager(1000)
    register = Register(WIRE_VERSION, "main", "target", ["target_kv"], "model", 0)
    registered = service.handle(register)
    assert isinstance(registered, Registered)
    assert registered.epoch == 1000
    assert service.handle(Leave(Epoch(1))) == Fenced(Epoch(1))
    assert not isinstance(service.handle(Renew(registered.epoch)), Fenced | BadRequest)


def test_an_epoch_that_never_was_is_refused() -> None:
    assert isinstance(manager(1000).handle(Renew(Epoch(1000))), BadRequest)
