"""What toy targets of both kinds have around them: the model, a client of the memory service, the tokenizer's side."""

import hashlib

from memsvc.core.config import PoolConfig
from memsvc.core.manager import MemoryManager
from memsvc.registration import Registration, StepParts
from memsvc.wire import links
from memsvc.wire.base import WIRE_VERSION, FinishReason, ReqId, pack_tokens
from memsvc.wire.codec import decoder, encode
from memsvc.wire.mem import KindSpec, Register, Renew, Stepped
from memsvc.wire.text import Abort, Admit, EngineStats, Sampling
from target_worker.keeper import RequestKeeper
from target_worker.req import Req

VOCAB = 1000
EOS = 7
TARGET_PAGE_BYTES = 1024
DRAFT_PAGE_BYTES = 256


def next_token(tokens: list[int]) -> int:
    """What the toy model says after these tokens."""
    digest = hashlib.blake2b(pack_tokens(tokens), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def continuation(tokens: list[int], num: int) -> list[int]:
    """The answer of at most num tokens, ended by EOS."""
    out: list[int] = []
    while len(out) < num and (not out or out[-1] != EOS):
        out.append(next_token(tokens + out))
    return out


class ToyClient:
    """MemoryClient over a manager in this process; every message goes through the codec."""

    def __init__(self, manager: MemoryManager, engine: str) -> None:
        self.manager = manager
        self._registration = Registration()
        self._reply = b""
        kinds = [kind.name for kind in manager.layout.kinds]
        self.registered = self._registration.began(
            self._call(Register(WIRE_VERSION, engine, "target", kinds, "toy", 0))
        )

    def _call(self, msg):
        request = decoder(links.MEM.there).decode(encode(msg))
        return decoder(links.MEM.back).decode(encode(self.manager.handle(request)))

    def begin_step(self, parts: StepParts) -> None:
        self._reply = self._call(self._registration.make_step(parts))

    def finish_step(self) -> Stepped:
        return self._registration.stepped(self._reply)

    def renew(self) -> None:
        self._call(Renew(self._registration.epoch))


class ToyText:
    """Collects what goes out and insists on one terminal message for each request."""

    def __init__(self) -> None:
        self.inbox: list = []
        self.tokens: dict[ReqId, list[int]] = {}
        self.finished: dict[ReqId, FinishReason] = {}
        self.failed: dict[ReqId, str] = {}
        self.usages: dict = {}
        self.stats: EngineStats | None = None

    def receive(self, _timeout_s: float) -> list:
        messages, self.inbox = self.inbox, []
        return messages

    def add(self, req: Req, tokens: list[int]) -> None:
        assert req.rid not in self.finished, f"rid {req.rid} gets tokens after its end"
        self.tokens.setdefault(req.rid, []).extend(tokens)
        if req.finish:
            self.finished[req.rid] = req.finish
            self.usages[req.rid] = req.usage()

    def fail(self, rid: ReqId, kind: str, message: str) -> None:
        assert rid not in self.finished
        self.finished[rid] = FinishReason.ERROR
        self.failed[rid] = f"{kind}: {message}"

    def flush(self) -> None:
        pass

    def send_stats(self, stats: EngineStats, *, idle: bool) -> None:
        self.stats = stats


class ToyServer:
    """Requests in, texts out, steps in between."""

    manager: MemoryManager
    text: ToyText
    scheduler: RequestKeeper
    prompts: dict[ReqId, tuple[list[int], int]]

    def step(self) -> None:
        """One round of the scheduler."""
        raise NotImplementedError

    def submit(self, rid: int, prompt: list[int], max_tokens: int, *, priority: int = 0, out: int = 0) -> None:
        """Admit a request; `out` tokens of its answer count as given out before."""
        answer = continuation(prompt, out)
        sampling = Sampling(seed=0, max_tokens=max_tokens, temperature=0.0)
        self.prompts[ReqId(rid)] = (prompt, max_tokens)
        self.text.tokens[ReqId(rid)] = list(answer)
        self.text.inbox.append(Admit(ReqId(rid), pack_tokens(prompt + answer), len(prompt), sampling, priority))

    def abort(self, rid: int) -> None:
        """The client of rid went away."""
        self.text.inbox.append(Abort(ReqId(rid)))

    def run(self, max_steps: int = 5000) -> int:
        """Step until nothing is left; the number of steps. AssertionError if that takes more than max_steps."""
        for num in range(max_steps):
            self.step()
            if self.scheduler.is_idle and not self.text.inbox:
                self.step()
                return num + 1
        raise AssertionError(f"not idle after {max_steps} steps: {self.text.stats}")

    def check_texts(self) -> None:
        """Every request ended, and those that were not aborted have the toy model's text."""
        for rid, (prompt, max_tokens) in self.prompts.items():
            assert rid in self.text.finished, f"rid {rid} never ended"
            if self.text.finished[rid] in (FinishReason.STOP, FinishReason.LENGTH):
                assert self.text.tokens[rid] == continuation(prompt, max_tokens), f"rid {rid} has another text"


def pool_config(kinds: list[KindSpec], page_size: int, num_frames: int) -> PoolConfig:
    """A pool with frames of one target page each, or about that."""
    return PoolConfig(arena_bytes=num_frames * TARGET_PAGE_BYTES, page_size=page_size, kinds=kinds, slack_tokens=0)
