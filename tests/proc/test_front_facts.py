"""What a front says about itself: models, health, server_info, metrics, and the cache flush."""

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.plan import KindPlan, MemoryPlan
from memsvc.wire.text import Submit, Usage
from tests.support.front import RunningFront, running_front

PLAN = MemoryPlan(
    arena_bytes=309_000,
    smallest_bytes=100_000,
    one_request_bytes=200_000,
    all_requests_bytes=500_000,
    frame_bytes=3000,
    num_frames=103,
    exchange_bytes=6000,
    kinds=(
        KindPlan(
            name="target_kv",
            page_bytes=1000,
            stride_bytes=1000,
            pages_per_frame=3,
            tokens_per_page=16,
            pages_per_req=0,
            window=0,
        ),
    ),
    pool_tokens=3200,
    lines=("arena 309000 bytes",),
)
TARGET_STATS: dict[str, Any] = {
    "num_running": 2, "prompt_tokens": 50, "cached_tokens": 20, "generated_tokens": 90, "num_steps": 33,
    "num_retracts": 1, "num_drafts": 30, "num_draft_tokens": 60, "num_accepted": 45, "accepted_per_pos": [28, 17],
    "width": 2, "widths": [0, 2], "width_steps": [3, 30], "width_tokens": [15, 75], "width_seconds": [0.5, 6.25],
}  # fmt: skip

# Read by vllm bench serve, sglang.bench_serving, aiperf, llm-d and AIBrix.
WANTED = {
    "vllm:spec_decode_num_drafts_total": 30,
    "vllm:spec_decode_num_draft_tokens_total": 60,
    "vllm:spec_decode_num_accepted_tokens_total": 45,
    "vllm:num_requests_running": 2,
    "vllm:num_requests_waiting": 0,
    "vllm:prefix_cache_hits_total": 30,
    "vllm:prefix_cache_queries_total": 120,
    "vllm:prompt_tokens_total": 50,
    "vllm:generation_tokens_total": 90,
    "vllm:num_preemptions_total": 1,
    "sglang:num_running_reqs": 2,
    "sglang:num_queue_reqs": 0,
    "sglang:spec_accept_length": 2.5,
    "sglang:spec_accept_rate": 0.75,
    "memsvc_spec_width": 2,
    "sglang:cached_tokens_total": 20,
    "sglang:prompt_tokens_total": 50,
    "sglang:max_total_num_tokens": 3200,
    "sglang:page_size": 16,
    "sglang:num_pages": 200,
    "sglang:cache_hit_rate": 0.25,
    "memsvc_evicted_pages_total": 8,
    "memsvc_retracts_total": 1,
    "memsvc_unusable_bytes": 1234,
    "memsvc_arena_bytes": 309_000,
    "memsvc_bad_frames_total": 4,
    "memsvc_no_room_total": 2,
}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    facts: dict[str, Any] = {
        "plan": PLAN, "block_size": 3, "widths": [0, 2], "draft_model_path": "/models/draft",
    }  # fmt: skip
    with running_front(tmp_path_factory.mktemp("front"), **facts) as running:
        running.engine.stats(**TARGET_STATS)
        running.wait_for_metric("memsvc_generation_tokens_total", TARGET_STATS["generated_tokens"])
        yield running


def samples(front: RunningFront) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(front.client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def test_models_lists_every_served_name(front: RunningFront) -> None:
    models = front.client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["toy", "toy-alias"]
    one = front.client.get("/v1/models/toy-alias").json()
    assert (one["max_model_len"], one["root"], one["owned_by"]) == (128, "/models/toy", "memsvc")


def test_every_name_that_tools_read_has_its_value(front: RunningFront) -> None:
    found = samples(front)
    got = {name: sum(value for _labels, value in found.get(name, [])) for name in WANTED}
    assert got == WANTED


def test_per_position_counters_have_the_position_as_label(front: RunningFront) -> None:
    rows = samples(front)["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert [(labels["position"], value) for labels, value in rows] == [("0", 28), ("1", 17)]
    assert all(labels["model_name"] == "toy" for labels, _value in rows)


def test_steps_tokens_and_time_are_told_by_the_drafts_of_a_block(front: RunningFront) -> None:
    found = samples(front)
    for name, numbers in (("steps", [3, 30]), ("tokens", [15, 75]), ("seconds", [0.5, 6.25])):
        rows = found[f"memsvc_spec_width_{name}_total"]
        assert [(labels["drafts"], value) for labels, value in rows] == list(zip("02", numbers, strict=True))


def test_bytes_are_told_by_kind_and_state(front: RunningFront) -> None:
    found = samples(front)
    pages = {(row["kind"], row["state"]): value for row, value in found["memsvc_page_bytes"]}
    assert pages["target_kv", "private"] == 60_000
    assert pages["target_kv", "tree"] == 30_000
    assert pages["draft_kv", "free"] == 30_000
    assert {row["kind"]: value for row, value in found["memsvc_kind_bytes"]} == {"target_kv": 120e3, "draft_kv": 30e3}
    assert sum(value for _row, value in found["memsvc_frames"]) == 103
    # 70 target pages of 1000 bytes are held by someone, of 100 usable frames.
    assert found["vllm:kv_cache_usage_perc"][0][1] == pytest.approx(70_000 / 300_000)


def test_latencies_and_ends_are_counted(front: RunningFront) -> None:
    before = samples(front)
    response = front.post("/v1/completions", prompt="x")
    submit = front.engine.expect(Submit)
    front.engine.say(submit.rid, "a b")
    front.engine.finish(submit.rid, " c", usage=Usage(5, 3, 0, accepted=[0, 1, 1], num_drafts=4))
    assert response.result().status_code == 200
    after = samples(front)

    def growth(name: str, **labels: str) -> float:
        def total(found: dict[str, list[tuple[dict[str, str], float]]]) -> float:
            rows = found.get(name, [])
            return sum(value for row, value in rows if labels.items() <= row.items())

        return total(after) - total(before)

    for name in ("memsvc_time_to_first_token_seconds", "vllm:time_to_first_token_seconds",
                 "vllm:e2e_request_latency_seconds", "vllm:request_time_per_output_token_seconds",
                 "sglang:e2e_request_latency_seconds", "memsvc_request_accept_length"):  # fmt: skip
        assert growth(f"{name}_count") == 1
    assert growth("memsvc_request_accept_length_sum") == 2.5
    assert growth("vllm:request_success_total", finished_reason="stop") == 1
    assert growth("vllm:request_generation_tokens_sum") == 3


def test_server_info_has_both_spellings_and_the_plan(front: RunningFront) -> None:
    info = front.client.get("/server_info").json()
    assert (info["page_size"], info["block_size"], info["max_running_requests"]) == (16, 16, 32)
    assert info["speculative_num_draft_tokens"] == 3
    assert info["num_speculative_tokens"] == 2
    assert info["speculative_widths"] == [0, 2]
    assert info["internal_states"][0]["avg_spec_accept_length"] == 2.5
    assert info["internal_states"][0]["memory"]["num_frames"] == 103
    assert info["memory_plan"]["kinds"][0]["name"] == "target_kv"
    assert front.client.get("/get_server_info").json()["page_size"] == 16
    assert front.client.get("/model_info").json()["is_generation"] is True
    assert front.client.get("/version").json()["version"]


def test_both_flush_routes_reach_the_memory_service(front: RunningFront) -> None:
    before = front.engine.memory.num_flushes
    assert front.client.post("/flush_cache", params={"timeout": 5}).status_code == 200
    assert front.client.post("/reset_prefix_cache").status_code == 200
    assert front.engine.memory.num_flushes == before + 2


def test_without_an_answer_of_the_memory_service_the_rest_is_still_told(front: RunningFront) -> None:
    # The last test of this file: the memory service stays silent after it.
    front.engine.memory.stop()
    found = samples(front)
    assert "memsvc_frames" not in found
    assert "vllm:num_requests_running" in found
    refused = front.client.post("/flush_cache")
    assert refused.status_code == 503
    assert "memory service" in refused.json()["error"]["message"]
