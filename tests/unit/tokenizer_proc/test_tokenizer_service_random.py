"""Random lives of many requests: one terminal message each, texts as if each had been alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from memsvc.wire.base import FinishReason, ReqId, pack_tokens, unpack_tokens
from memsvc.wire.text import Abort, Accepted, Admit, Failed, Sampling, Submit, TextOut, TextPrompt, TokensOut, Usage
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import PromptEncoder, Text
from tokenizer_proc.service import TextService

EVENTS = st.sampled_from(
    [
        "submit",
        "submit",
        "submit long",
        "encoded",
        "tokens",
        "tokens",
        "tokens",
        "tokens",
        "abort",
        "fail",
        "turn",
        "time",
    ]
)


class World:
    """Front and target around a service; each answer is a text known beforehand."""

    def __init__(self, encoder: PromptEncoder, config: TokenizerConfig) -> None:
        self.encoder = encoder
        self.later: list[tuple[ReqId, Text]] = []
        self.service = TextService(config, encoder, lambda rid, text: self.later.append((rid, text)))
        self.submits: dict[ReqId, Submit] = {}
        self.answers: dict[ReqId, list[int]] = {}
        self.sent: dict[ReqId, int] = {}
        self.aborted: set[ReqId] = set()
        self.texts: dict[ReqId, str] = {}
        self.tokens: dict[ReqId, list[int]] = {}
        self.ends: dict[ReqId, tuple[FinishReason | str, str]] = {}

    def submit(self, answer: str, stops: list[str], *, is_long: bool) -> None:
        rid = ReqId(len(self.submits) + 1)
        prompt = TextPrompt("the ox " * 30 if is_long else "the")
        self.submits[rid] = Submit(rid, prompt, Sampling(seed=0, max_tokens=0), stops)
        self.answers[rid] = list(self.encoder.encode(Text(text=answer, adds_special=False)))
        self.texts[rid], self.tokens[rid] = "", []
        self.service.on_front(self.submits[rid])

    def encoded(self) -> None:
        if self.later:
            rid, text = self.later.pop(0)
            self.service.on_encoded(rid, self.encoder.encode(text))

    def give_tokens(self, rid: ReqId, num: int) -> None:
        start = self.sent[rid]
        part = self.answers[rid][start : start + num]
        self.sent[rid] += num
        done = rid in self.aborted or start + num >= len(self.answers[rid])
        finish = FinishReason.RUNNING
        if done:
            finish = FinishReason.ABORT if rid in self.aborted else FinishReason.LENGTH
            del self.sent[rid]
        usages = [Usage(1, min(start + num, len(self.answers[rid])), 0)] if done else []
        self.service.on_target(TokensOut([rid], [pack_tokens(part)], [finish], usages))

    def turn(self) -> None:
        to_front, to_target = self.service.outgoing.take()
        for msg in to_target:
            if isinstance(msg, Admit):
                self.sent[msg.rid] = 0
            elif isinstance(msg, Abort) and msg.rid in self.sent:
                self.aborted.add(msg.rid)
        for msg in to_front:
            self.read(msg)

    def read(self, msg: Accepted | TextOut | Failed) -> None:
        if isinstance(msg, Accepted):
            assert msg.rid not in self.ends
            return
        if isinstance(msg, Failed):
            self.end(msg.rid, msg.kind, "")
            return
        usages, stops = iter(msg.usages), iter(msg.stops)
        for rid, text, packed, finish in zip(msg.rids, msg.texts, msg.token_ids, msg.finished, strict=True):
            assert rid not in self.ends
            self.texts[rid] += text
            self.tokens[rid] += unpack_tokens(packed)
            if finish:
                usage = next(usages)
                assert usage.completion_tokens in (len(self.tokens[rid]), 0)
                self.end(rid, finish, next(stops))
        assert (list(usages), list(stops)) == ([], [])

    def end(self, rid: ReqId, how: FinishReason | str, stop: str) -> None:
        assert rid not in self.ends, f"second end of {rid}"
        self.ends[rid] = (how, stop)

    def check(self, rid: ReqId) -> None:
        how, stop = self.ends[rid]
        answer = self.encoder.stream_for(self.submits[rid], self.encoder.encode(Text(text="x", adds_special=False)))
        text = answer.feed(self.answers[rid]) + answer.flush()
        assert self.tokens[rid] == self.answers[rid][: len(self.tokens[rid])]
        if how in (FinishReason.STOP, FinishReason.LENGTH):
            assert (self.texts[rid], len(self.tokens[rid]), stop) == (text, answer.num_tokens, answer.matched)
        else:
            assert stop == ""
            assert how in (FinishReason.ABORT, "internal")


@given(data=st.data(), events=st.lists(EVENTS, max_size=60))
@settings(max_examples=150, deadline=None)
def test_each_request_ends_once_with_the_text_of_its_own_tokens(
    chat_encoder: tuple[PromptEncoder, TokenizerConfig], data: st.DataObject, events: list[str]
) -> None:
    world = World(*chat_encoder)
    for event in [*events, "turn"]:
        running = sorted(world.sent)
        match event:
            case "submit" | "submit long":
                answer = data.draw(st.text("ab \u4f60\U0001f600", min_size=1, max_size=20))
                stops = data.draw(st.lists(st.text("ab \u4f60", min_size=1, max_size=3), max_size=2))
                world.submit(answer, stops, is_long=event == "submit long")
            case "encoded":
                world.encoded()
            case "tokens" if running:
                world.give_tokens(data.draw(st.sampled_from(running)), data.draw(st.integers(1, 5)))
            case "fail" if running:
                rid = data.draw(st.sampled_from(running))
                del world.sent[rid]
                world.service.on_target(Failed(rid, "internal", "gone"))
            case "abort" if world.submits:
                world.service.on_front(Abort(data.draw(st.sampled_from(sorted(world.submits)))))
            case "time":
                world.service.on_time(0.0 if data.draw(st.booleans()) else float("inf"))
            case "turn":
                world.turn()
    finish_all(world)
    assert set(world.ends) == set(world.submits)
    assert world.service.num_reqs == 0
    for rid in world.submits:
        world.check(rid)


def finish_all(world: World) -> None:
    """Everything that is on its way arrives."""
    while world.service.num_reqs:
        world.encoded()
        world.turn()
        for rid in sorted(world.sent):
            world.give_tokens(rid, 3)
        world.turn()
