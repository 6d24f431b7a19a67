"""A memory manager that only counts: for tests of the loop, the client and the transport."""

import threading

from memsvc.wire import admin, mem
from memsvc.wire.base import BadRequest, Done, Epoch, Msg, PageId


def make_layout(arena_bytes: int = 1 << 20) -> mem.Layout:
    """One token kind of 4 KiB pages, one page a frame."""
    num_frames = arena_bytes // 4096
    kind = mem.KindLayout("target_kv", 4096, 16, 0, 0, 1, 4096, num_frames)
    return mem.Layout(arena_bytes, 4096, num_frames, 16, [kind], arena_bytes, 0)


class FakeManager:
    """Grants a fresh page for each reserved request; keeps the last Step's reply; sees clients end."""

    def __init__(self, fd_endpoint: str = "") -> None:
        self.fd_endpoint = fd_endpoint
        self.layout = make_layout()
        self.clients: dict[Epoch, mem.Register] = {}
        self.nums: dict[Epoch, int] = {}
        self.replies: dict[Epoch, mem.Stepped] = {}
        self.exited: list[Epoch] = []
        self.num_handled = 0
        self._next_epoch = 1
        self._next_page = 1

    def handle(self, msg: mem.MemRequest) -> Msg:
        """Answer like the service; engine "bug" trips an assertion."""
        self.num_handled += 1
        if isinstance(msg, mem.Register):
            assert msg.engine != "bug", f"planted, {msg.engine=}"
            epoch = Epoch(self._next_epoch)
            self._next_epoch += 1
            self.clients[epoch] = msg
            self.nums[epoch] = 0
            return mem.Registered(epoch, self.layout, 5000, self.fd_endpoint)
        if msg.epoch not in self.clients:
            return mem.Fenced(msg.epoch)
        if isinstance(msg, mem.Step):
            return self._step(msg)
        if isinstance(msg, mem.Leave):
            del self.clients[msg.epoch]
        return Done()

    def _step(self, msg: mem.Step) -> Msg:
        last = self.nums[msg.epoch]
        if msg.num == last:
            return self.replies[msg.epoch]
        if msg.num != last + 1:
            return BadRequest(f"Step {msg.num} after {last}")
        rids = msg.reserve.rids if msg.reserve else []
        pages = [PageId(self._next_page + i) for i in range(len(rids))]
        self._next_page += len(rids)
        reply = mem.Stepped(msg.num, rids, [0] * len(rids), [0] * len(rids), pages)
        self.nums[msg.epoch] = msg.num
        self.replies[msg.epoch] = reply
        return reply

    def handle_admin(self, msg: admin.AdminRequest) -> Msg:
        """Stats of an empty service; everything else is refused."""
        if isinstance(msg, admin.GetStats):
            return admin.Stats(
                1, 4096, 1, 0, 0, [], 0, 0, len(self.clients), 0, 0, 0, [], 0, {}, 0, 0, sum(self.nums.values()), 0.0, 0
            )
        return BadRequest(f"the fake has no {type(msg).__name__}")

    def client_exited(self, epoch: Epoch) -> None:
        """Note it."""
        self.exited.append(epoch)
        self.clients.pop(epoch, None)

    def tick(self) -> float:
        """Nothing is ever due."""
        return 60.0


class StallingManager(FakeManager):
    """Carries out the first Step and then keeps its reply until `wake` is released: it comes too late."""

    def __init__(self) -> None:
        super().__init__()
        self.wake = threading.Semaphore(0)
        self._has_stalled = False

    def handle(self, msg: mem.MemRequest) -> Msg:
        """Answer like the fake."""
        reply = super().handle(msg)
        if isinstance(msg, mem.Step) and not self._has_stalled:
            self._has_stalled = True
            assert self.wake.acquire(timeout=20)
        return reply
