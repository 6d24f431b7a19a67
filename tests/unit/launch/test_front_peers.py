"""Which processes serve, as clients of the front see it."""

from dataclasses import replace

from launch.http.engine import Engine
from launch.http.metric_facts import engine_facts
from launch.http.tally import Tally
from memsvc.wire.control import PeerDown, PeerUp
from tests.support.engine_rig import CONFIG, ROLES, Sent


def test_a_process_that_has_never_served_counts_as_down():
    engine = Engine(replace(CONFIG, peers=(*ROLES, "draft")), Sent(), Tally())
    engine.on_peer(PeerUp("memsvc", 1))
    found = {fact.names: {labels["role"]: value for labels, value in fact.samples}
             for fact in engine_facts(engine) if fact.names.startswith("memsvc_process")}  # fmt: skip
    assert found == {
        "memsvc_process_up": {"memsvc": 1, "target": 0, "tokenizer": 0, "draft": 0},
        "memsvc_process_starts": {"memsvc": 1, "target": 0, "tokenizer": 0, "draft": 0},
    }
    assert engine.peers.report()["draft"] == {"up": False, "generation": 0}
    engine.on_peer(PeerUp("draft", 1))
    engine.on_peer(PeerDown("draft"))
    assert engine.peers.report()["draft"] == {"up": False, "generation": 1}
