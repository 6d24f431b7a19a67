"""GET /check of a front: what the memory service's audit looks like to a client, and when the server counts as idle."""

from pathlib import Path

import msgspec
from msgspec.structs import replace

from launch.http.info import check_body
from memsvc.wire.admin import CheckReport
from tests.support.fake_engine import STATS
from tests.support.front import running_front


def test_check_names_problems_leaks_and_pages_by_state(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        body = front.client.get("/check").json()
        assert body["leaked_bytes"] == 300
        assert body["num_pages_checked"] == 220
        (problem,) = body["problems"]
        assert (problem["kind"], problem["page"], problem["owner"]) == ("draft_kv", 17, "rid 5")
        assert body["pages"]["target_kv"] == {
            "free": 20, "private": 60, "tree": 30, "pinned": 5, "limbo": 4, "quarantine": 1,
        }  # fmt: skip
        assert body["idle"] is False


def test_a_server_is_idle_when_no_request_is_open_or_in_flight() -> None:
    clean = CheckReport([], 220, 0)
    no_reqs = replace(STATS, num_reqs=0)
    assert check_body(clean, no_reqs, num_live=0)["idle"] is True
    assert check_body(clean, no_reqs, num_live=1)["idle"] is False
    assert check_body(clean, STATS, num_live=0)["idle"] is False
    assert msgspec.json.encode(check_body(clean, no_reqs, num_live=0))


def test_check_says_so_when_the_memory_service_is_away(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        front.engine.peer_down("memsvc")
        while front.client.get("/health").status_code == 200:
            pass
        refused = front.client.get("/check")
        assert refused.status_code == 503
        assert "memory service" in refused.json()["error"]["message"]
