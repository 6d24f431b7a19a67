"""The front's engine against a made-up tokenizer and target that may die at any moment."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.http.calls import Call
from launch.http.engine import Engine
from launch.http.errors import ApiError
from launch.http.generation import from_completion
from launch.http.openai import CompletionRequest
from launch.http.tally import Tally
from memsvc.wire.base import FinishReason, ReqId, unpack_tokens
from memsvc.wire.control import PeerDown, PeerUp
from memsvc.wire.text import Abort, AbortAll, Failed, Submit, TextOut
from tests.support.engine_rig import CONFIG, ROLES, Sent, make_engine, out, start, submitted


def test_a_call_past_the_limit_is_turned_away_and_leaves_nothing():
    engine, sent = make_engine()
    for _ in range(7):
        start(engine)
    sent.take()
    with pytest.raises(ApiError) as caught:
        start(engine, n=2)
    assert caught.value.status == 429
    assert "7 requests" in caught.value.message
    assert "limit 8" in caught.value.message
    assert (len(engine.journal), sent.take(), engine.tally.turned_away) == (7, [], 1)


def test_a_call_that_can_never_fit_is_a_bad_request_with_the_numbers():
    engine, sent = make_engine()
    request = CompletionRequest(prompt=["x", "y", "z"], n=3)
    with pytest.raises(ApiError) as caught:
        engine.start(from_completion(request, engine.config))
    assert caught.value.status == 400
    assert "3 prompts times n=3 are 9 choices, this server can hold 8" in caught.value.message
    assert (len(engine.journal), sent.take(), engine.tally.turned_away) == (0, [], 0)


def test_the_journal_is_bounded_in_bytes():
    engine = Engine(replace(CONFIG, max_journal_bytes=500), Sent(), Tally())
    with pytest.raises(ApiError) as caught:
        engine.start(from_completion(CompletionRequest(prompt="x" * 600), engine.config))
    assert caught.value.status == 429
    assert len(engine.journal) == engine.journal.num_bytes == 0


def test_bytes_of_the_journal_come_back_to_zero():
    engine, sent = make_engine()
    calls = [start(engine, n=2) for _ in range(3)]
    rids = [submit.rid for submit in submitted(sent)]
    engine.on_text(out(rids[0], "a b", [1, 2]))
    engine.on_text(out(rids[0], "c", [3], FinishReason.STOP))
    engine.on_text(Failed(rids[2], "internal", "broken"))
    for call in calls:
        engine.abort(call)
    assert len(engine.journal) == engine.journal.num_bytes == 0


def test_an_answer_that_the_server_ended_is_an_error():
    engine, sent = make_engine()
    call = start(engine)
    (submit,) = submitted(sent)
    engine.on_text(out(submit.rid, "", [], FinishReason.ABORT))
    assert call.error is not None
    assert call.error.status == 500


def test_two_processes_that_die_together_cause_one_resubmission():
    engine, sent = make_engine()
    start(engine)
    sent.take()
    for role in ROLES:
        engine.on_peer(PeerDown(role))
    for role in ROLES:
        assert sent.take() == []
        engine.on_peer(PeerUp(role, 2))
    first, second = sent.take()
    assert first == AbortAll()
    assert isinstance(second, Submit)


def test_what_a_dead_tokenizer_did_not_read_is_not_sent_to_the_next_one():
    engine, sent = make_engine()
    start(engine)
    (unread,) = sent.messages
    assert isinstance(unread, Submit)
    engine.on_peer(PeerDown("tokenizer"))
    engine.on_peer(PeerUp("tokenizer", 2))
    first, second = sent.take()
    assert first == AbortAll()
    assert isinstance(second, Submit)
    assert second.rid != unread.rid


def test_the_same_generation_again_sends_nothing_again():
    engine, sent = make_engine()
    start(engine)
    sent.take()
    engine.on_peer(PeerUp("target", 1))
    assert sent.take() == []


DIES_AS = {"target": "model", "tokenizer": "tokenizer"}


def token_of(seed: int, position: int) -> int:
    return (seed * 7 + position * 3) % 50


def text_of(tokens: list[int]) -> str:
    return "".join(f"{token} " for token in tokens)


class FakeWorkers:
    """Tokenizer and target in one: each request's tokens follow from its seed, as the real ones promise."""

    def __init__(self, engine: Engine, sent: Sent, chance: random.Random) -> None:
        self.engine = engine
        self.sent = sent
        self.chance = chance
        self.generations: dict[str, int] = dict.fromkeys(ROLES, 1)
        self.reqs: dict[ReqId, Submit] = {}
        self.done: dict[ReqId, list[int]] = {}
        self.late: list[TextOut] = []

    def receive(self) -> None:
        for msg in self.sent.take():
            match msg:
                case Submit(rid):
                    assert rid not in self.done
                    self.reqs[rid] = msg
                    self.done[rid] = unpack_tokens(msg.resumed)
                case Abort(rid):
                    self.reqs.pop(rid, None)
                case AbortAll():
                    self.reqs.clear()

    def step(self) -> None:
        """A random request gets one to three tokens; now and then the message is held up on its way."""
        self.receive()
        if not self.reqs:
            return
        rid, submit = self.chance.choice(sorted(self.reqs.items()))
        tokens = self.done[rid]
        limit = submit.sampling.max_tokens
        new = [token_of(submit.sampling.seed, pos) for pos in range(len(tokens), limit)][: self.chance.randint(1, 3)]
        tokens += new
        finish = FinishReason.LENGTH if len(tokens) == limit else FinishReason.RUNNING
        if finish:
            del self.reqs[rid]
        msg = out(rid, text_of(new), new, finish)
        if self.chance.random() < 0.1 and not finish:
            self.late.append(msg)
            self.reqs.pop(rid)
            self.die(self.chance.choice(["target", "tokenizer"]))
        else:
            self.engine.on_text(msg)

    def die(self, role: str) -> None:
        """A process dies, what it had on its way arrives late or never, and it is started again."""
        self.engine.on_peer(PeerDown(role))
        self.reqs.clear()
        self.sent.take()
        if self.chance.random() < 0.5:
            self.arrive_late()
        self.generations[role] += 1
        self.engine.on_peer(PeerUp(role, self.generations[role]))
        self.arrive_late()

    def arrive_late(self) -> None:
        while self.late:
            self.engine.on_text(self.late.pop(0))


@settings(max_examples=200)
@given(st.integers(0, 1 << 30))
def test_every_answer_is_whole_whatever_dies(seed: int):
    chance = random.Random(seed)
    engine, sent = make_engine()
    workers = FakeWorkers(engine, sent, chance)
    calls: list[tuple[Call, list[str]]] = []
    for _ in range(chance.randint(20, 80)):
        match chance.randint(0, 9):
            case 0 | 1 if len(engine.journal) < 7:
                calls.append((start(engine, chance.randint(1, 12), n=chance.randint(1, 2)), ["", ""]))
            case 2:
                workers.die(chance.choice(ROLES[1:]))
            case 3 if calls:
                take(*chance.choice(calls))
            case 4 if len(calls) > 3:
                call, _texts = calls.pop()
                engine.abort(call)
            case _:
                workers.step()
    while len(engine.journal):
        workers.step()
    for call, texts in calls:
        take(call, texts)
        if call.error is not None:
            died = [role for role, name in DIES_AS.items() if f"the {name} process died 2 times" in call.error.message]
            assert workers.generations[died[0]] >= 3
        for choice in call.choices:
            sampling = call.generation.sampling_of(choice.index)
            wanted = text_of([token_of(sampling.seed, pos) for pos in range(sampling.max_tokens)])
            if call.error is None:
                assert choice.finish is FinishReason.LENGTH
                assert texts[choice.index] == wanted
            assert wanted.startswith(texts[choice.index])


def take(call: Call, texts: list[str]) -> None:
    """What an answer would have written."""
    for choice in call.choices:
        texts[choice.index] += choice.take_text()
