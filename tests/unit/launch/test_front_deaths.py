"""Requests that were in flight when target or tokenizer died: which are sent again, and which are failed."""

import pytest

from memsvc.wire.control import PeerDown, PeerUp
from memsvc.wire.text import Accepted
from tests.support.engine_rig import make_engine, out, restart, start, submitted


@pytest.mark.parametrize("roles", [("target",), ("memsvc", "target")])
def test_a_request_in_flight_at_two_deaths_without_a_token_is_failed_with_its_siblings(roles: tuple[str, ...]):
    engine, sent = make_engine()
    call = start(engine, n=2)
    restart(engine, 2, *roles)
    _first, second = submitted(sent)[-2:]
    engine.on_text(out(second.rid, "a", [1]))
    restart(engine, 3, *roles)
    assert submitted(sent) == []
    assert call.error is not None
    assert call.error.status == 500
    assert "internal error: the model process died 2 times" in call.error.message
    assert len(engine.journal) == engine.journal.num_bytes == 0


def test_a_request_that_gets_tokens_between_deaths_is_always_sent_again():
    engine, sent = make_engine()
    call = start(engine, num_tokens=9)
    for generation in range(2, 9):
        restart(engine, generation, "target")
        engine.on_text(out(submitted(sent)[-1].rid, "a", [1]))
    assert call.error is None


def test_a_request_in_flight_at_two_deaths_of_the_tokenizer_without_a_token_is_failed_and_not_to_be_retried():
    engine, sent = make_engine()
    killer = start(engine)
    restart(engine, 2, "tokenizer")
    (resent,) = submitted(sent)
    # To have encoded the prompt is no progress: the tokenizer may die of the first token.
    engine.on_text(Accepted(resent.rid, 1))
    later = start(engine)
    restart(engine, 3, "tokenizer")
    assert killer.error is not None
    assert killer.error.status == 500
    assert "the tokenizer process died 2 times" in killer.error.message
    assert ("x-should-retry", "false") in killer.error.headers
    assert later.error is None
    assert [submit.rid for submit in submitted(sent)] == [entry.rid for entry in engine.journal]


def test_a_request_that_gets_tokens_between_deaths_of_the_tokenizer_is_always_sent_again():
    engine, sent = make_engine()
    call = start(engine, num_tokens=9)
    for generation in range(2, 9):
        restart(engine, generation, "tokenizer")
        engine.on_text(out(submitted(sent)[-1].rid, "a", [1]))
    assert call.error is None


def test_a_death_of_each_kind_and_deaths_before_a_request_was_sent_do_not_count():
    engine, sent = make_engine()
    both = start(engine)
    restart(engine, 2, "tokenizer")
    restart(engine, 2, "target")
    assert both.error is None
    sent.take()
    engine.on_peer(PeerDown("target"))
    held = start(engine)
    engine.on_peer(PeerUp("target", 3))
    assert both.error is not None
    assert len(submitted(sent)) == 1
    restart(engine, 4, "target")
    assert held.error is None
    assert len(submitted(sent)) == 1
