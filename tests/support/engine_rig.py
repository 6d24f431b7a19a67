"""The front's engine without processes, and what its tests say to it."""

from launch.http.calls import Call
from launch.http.config import FrontConfig
from launch.http.engine import Engine
from launch.http.generation import from_completion
from launch.http.openai import CompletionRequest
from launch.http.tally import Tally
from memsvc.wire.base import FinishReason, ReqId, pack_tokens
from memsvc.wire.control import PeerDown, PeerUp
from memsvc.wire.text import AbortAll, FrontToTok, Submit, TextOut, Usage

ROLES = ("memsvc", "target", "tokenizer")
CONFIG = FrontConfig(
    run_dir="",
    model_path="/m",
    served_model_names=("m",),
    context_len=64,
    max_running_requests=4,
    max_queued_requests=4,
)


class Sent:
    """Takes the place of the socket to the tokenizer."""

    def __init__(self) -> None:
        self.messages: list[FrontToTok] = []

    def send(self, msg: FrontToTok) -> None:
        """Note it."""
        self.messages.append(msg)

    def reopen(self) -> None:
        """What was not read is lost."""
        self.messages.clear()

    def take(self) -> list[FrontToTok]:
        """All messages since the last time."""
        taken, self.messages = self.messages, []
        return taken


def make_engine() -> tuple[Engine, Sent]:
    """An engine whose peers are all up."""
    sent = Sent()
    engine = Engine(CONFIG, sent, Tally())
    for role in ROLES:
        engine.on_peer(PeerUp(role, 1))
    assert sent.take() == [AbortAll()]
    return engine, sent


def start(engine: Engine, num_tokens: int = 5, n: int = 1) -> Call:
    """A completion of num_tokens, which is its seed as well."""
    request = CompletionRequest(prompt="x", max_tokens=num_tokens, n=n, seed=num_tokens)
    return engine.start(from_completion(request, engine.config))


def out(rid: ReqId, text: str, tokens: list[int], finish: FinishReason = FinishReason.RUNNING) -> TextOut:
    """Output of one request."""
    usages = [Usage(1, len(tokens), 0)] if finish else []
    return TextOut([rid], [text], [pack_tokens(tokens)], [finish], usages, [""] if finish else [])


def submitted(sent: Sent) -> list[Submit]:
    """Take all messages and keep the requests."""
    return [msg for msg in sent.take() if isinstance(msg, Submit)]


def restart(engine: Engine, generation: int, *roles: str) -> None:
    """All roles die, then come back."""
    for role in roles:
        engine.on_peer(PeerDown(role))
    for role in roles:
        engine.on_peer(PeerUp(role, generation))
