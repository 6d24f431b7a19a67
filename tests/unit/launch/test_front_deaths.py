"""Requests that were in flight when the target died: which are sent again, and which are failed."""

import pytest

from memsvc.wire.control import PeerDown, PeerUp
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


def test_deaths_of_the_tokenizer_and_deaths_before_a_request_was_sent_do_not_count():
    engine, sent = make_engine()
    for generation in (2, 3, 4):
        start(engine)
        restart(engine, generation, "tokenizer")
    sent.take()
    engine.on_peer(PeerDown("target"))
    held = start(engine)
    engine.on_peer(PeerUp("target", 2))
    assert len(submitted(sent)) == 4
    restart(engine, 3, "target")
    assert held.error is None
    assert len(submitted(sent)) == 1
