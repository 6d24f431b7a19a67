"""Which processes serve, as clients of the front see it."""

from dataclasses import replace

from launch.http.engine import Engine
from launch.http.metric_facts import engine_facts
from launch.http.tally import Tally
from memsvc.wire.control import PeerDown, PeerList, PeerUp
from memsvc.wire.text import AbortAll
from tests.support.engine_rig import CONFIG, ROLES, Sent


def metrics(engine: Engine) -> dict[str, dict[str, float]]:
    """Samples by role of the facts about processes."""
    facts = [fact for fact in engine_facts(engine) if fact.names.startswith("memsvc_process")]
    return {fact.names.removeprefix("memsvc_process_"): {labels["role"]: num for labels, num in fact.samples}
            for fact in facts}  # fmt: skip


def test_a_process_that_has_never_served_counts_as_down():
    engine = Engine(CONFIG, Sent(), Tally())
    engine.on_peer(PeerList({"memsvc": 1, "target": 1, "tokenizer": 0, "draft": 0}, up=["memsvc"], silent=[]))
    assert metrics(engine) == {
        "up": {"front": 1, "memsvc": 1, "target": 0, "tokenizer": 0, "draft": 0},
        "starts": {"front": 1, "memsvc": 1, "target": 1, "tokenizer": 0, "draft": 0},
    }
    assert engine.peers.report()["draft"] == {"up": False, "generation": 0}
    engine.on_peer(PeerUp("draft", 1))
    engine.on_peer(PeerDown("draft"))
    assert engine.peers.report()["draft"] == {"up": False, "generation": 1}


def test_a_new_front_knows_at_once_how_often_the_others_were_started():
    sent = Sent()
    engine = Engine(replace(CONFIG, generation=3), sent, Tally())
    generations = {"memsvc": 1, "target": 2, "tokenizer": 5, "draft": 4}
    engine.on_peer(PeerList(generations, up=["memsvc", "target", "tokenizer"], silent=["target"]))
    assert metrics(engine)["starts"] == {"front": 3, **generations}
    assert metrics(engine)["up"] == {"front": 1, "memsvc": 1, "target": 1, "tokenizer": 1, "draft": 0}
    assert engine.peers.obstacles == ["target gives no sign of life"]
    assert sent.take() == [AbortAll()], "what was left of an earlier front goes on"


def test_what_starts_is_new_to_a_front_that_had_heard_of_it_before_it_served():
    sent = Sent()
    engine = Engine(CONFIG, sent, Tally())
    engine.on_peer(PeerList(dict.fromkeys(ROLES, 1), up=["memsvc"], silent=[]))
    for role in ROLES[1:]:
        assert sent.take() == []
        engine.on_peer(PeerUp(role, 1))
    assert sent.take() == [AbortAll()]
    assert engine.is_serving
