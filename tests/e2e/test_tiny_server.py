"""The whole stack on a tiny model: memory pressure, killed processes, one pool for target and draft."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.samples import Sample

from tests.support.served import PLAIN, Answer, Served, chat
from tests.support.tiny_server import prompt, write_tiny_drafter, write_tiny_model

pytestmark = pytest.mark.slow

NUM_REQUESTS = 32
FLAGS = ["--dtype", "float32", "--page-size", "4", "--threads", "1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's folder."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def drafter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its drafter's folder."""
    return write_tiny_drafter(tmp_path_factory.mktemp("drafter") / "drafter", tiny)


def work(num: int = NUM_REQUESTS, max_tokens: int = 60) -> list[dict[str, Any]]:
    """Requests of unlike lengths, some with a prefix in common, each with its seed."""
    return [
        chat(prompt(index % 9, 20 + index % 32), temperature=1.0, seed=index, max_tokens=max_tokens, ignore_eos=True)
        for index in range(num)
    ]


@pytest.fixture(scope="module")
def quiet(tiny: Path) -> list[Answer]:
    """Answers to `work` one at a time in a big pool without speculation."""
    with Served([*FLAGS, "--model-path", str(tiny), "--mem-bytes", "64M"]) as server:
        return server.chat_all(work(), 1)


@pytest.fixture(scope="module")
def quiet_texts(quiet: list[Answer]) -> list[str]:
    """Their texts."""
    return [answer.text for answer in quiet]


@pytest.fixture(scope="module")
def server(tiny: Path, drafter: Path) -> Iterator[Served]:
    """A speculative server for tests that leave it serving."""
    flags = [*FLAGS, "--model-path", str(tiny), "--mem-bytes", "64M", "--speculative-draft-model-path", str(drafter)]
    with Served([*flags, "--spec-tokens", "3"]) as served:
        yield served


def test_concurrency_and_drafts_give_the_same_texts(server: Served, quiet_texts: list[str]) -> None:
    assert [answer.text for answer in server.chat_all(work(), NUM_REQUESTS)] == quiet_texts
    server.check_idle()


@pytest.mark.parametrize("drafts", ["3", "auto"])
def test_a_third_of_the_memory_gives_the_same_texts(
    server: Served, tiny: Path, drafter: Path, quiet: list[Answer], drafts: str
) -> None:
    flags = [*FLAGS, "--model-path", str(tiny), "--context-length", "384"]
    flags += ["--speculative-draft-model-path", str(drafter), "--spec-tokens", drafts]
    num_tokens = sum(answer.usage["total_tokens"] for answer in quiet)
    with Served([*flags, "--mem-bytes", str(pool_bytes(server, num_tokens // 3))]) as tight:
        answers = tight.chat_all(work(), NUM_REQUESTS)
        assert [answer.text for answer in answers] == [answer.text for answer in quiet]
        assert {answer.finish_reason for answer in answers} == {"length"}
        assert metric(tight, "memsvc_retracts_total") + metric(tight, "memsvc_no_room_total") > 0
        tight.check_idle()


def pool_bytes(server: Served, num_tokens: int) -> int:
    """Bytes of a pool for so many tokens."""
    plan = server.get("/server_info")["memory_plan"]
    one = sum(kind["stride_bytes"] // kind["tokens_per_page"] for kind in plan["kinds"])
    return plan["exchange_bytes"] + num_tokens * one


def metric(server: Served, name: str, **labels: str) -> float:
    """The sum of the samples of that name that carry these labels."""
    return total(server.metrics(), name, **labels)


def total(samples: list[Sample], name: str, **labels: str) -> float:
    """The same over samples at hand."""
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


@pytest.mark.parametrize("role", ["draft", "target", "tokenizer", "memsvc"])
def test_a_killed_process_costs_no_request_and_no_text(server: Served, quiet_texts: list[str], role: str) -> None:
    answers = asyncio.run(streams_with_a_kill(server, lambda: os.kill(server.child(role), signal.SIGKILL)))
    assert answers == quiet_texts
    server.check_idle()


async def streams_with_a_kill(server: Served, kill: Callable[[], None]) -> list[str]:
    """All of `work` as streams; kill runs when half of them have begun to give text."""
    begun = 0
    done = False

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        nonlocal begun, done
        text = ""
        terminal = 0
        async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                choice = chunk["choices"][0]
                begun += not text and bool(choice["delta"].get("content"))
                text += choice["delta"].get("content") or ""
                terminal += choice["finish_reason"] is not None
                if begun >= NUM_REQUESTS // 2 and not done:
                    done = True
                    kill()
        assert terminal == 1
        return text

    async with (
        httpx.AsyncClient(base_url=server.url, timeout=120, verify=PLAIN) as client,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(one(client, body)) for body in work()]
    return [task.result() for task in tasks]


def test_a_front_killed_with_open_requests_leaves_nothing_behind(server: Served) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, verify=PLAIN) as client:
            tasks = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in work()]
            while metric(server, "memsvc_requests_running") < 4:
                await asyncio.sleep(0.01)
            os.kill(server.child("front"), signal.SIGKILL)
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    wait_healthy(server)
    server.check_idle()
    assert len(server.chat_all(work(4), 4)) == 4


def wait_healthy(server: Served) -> None:
    """Until /health says so."""
    for _ in range(600):
        try:
            server.get("/health")
            return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError("not healthy again:\n" + "".join(server.lines[-30:]))


def test_a_killed_supervisor_takes_every_process_along(tiny: Path, drafter: Path) -> None:
    flags = [*FLAGS, "--model-path", str(tiny), "--mem-bytes", "8M", "--speculative-draft-model-path", str(drafter)]
    with Served(flags, ends_with=-signal.SIGKILL) as served:
        served.chat_all(work(2, 5), 2)
        pids = {role: served.child(role) for role in ("memsvc", "draft", "target", "tokenizer", "front")}
        os.kill(served.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while alive := [role for role, pid in pids.items() if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, f"{alive} outlive the supervisor"
            time.sleep(0.05)


@pytest.mark.parametrize("heavy", ["target", "draft"])
def test_target_heavy_and_draft_heavy_loads_both_fill_the_one_pool(tiny: Path, tmp_path: Path, heavy: str) -> None:
    # A drafter of one layer holds a third of the target's bytes per token, one of six layers twice as much.
    layers = 1 if heavy == "target" else 6
    drafter = write_tiny_drafter(tmp_path / "drafter", tiny, num_hidden_layers=layers, sliding_window=4096)
    flags = [*FLAGS, "--model-path", str(tiny), "--context-length", "384", "--mem-bytes", "1500K"]
    with Served([*flags, "--speculative-draft-model-path", str(drafter)]) as served:
        shares = asyncio.run(filled_under_pressure(served))
        kinds = {name: metric(served, "memsvc_kind_bytes", kind=name) for name in ("target_kv", "draft_kv")}
        served.check_idle()
    assert sum(shares) / len(shares) > 0.95
    assert (kinds["draft_kv"] > kinds["target_kv"]) == (heavy == "draft")


async def filled_under_pressure(served: Served) -> list[float]:
    """Shares of the arena in use (private, tree, limbo, and what is not the pool's), sampled once it is full."""
    shares: list[float] = []
    load = asyncio.create_task(asyncio.to_thread(served.chat_all, work(44, 48), NUM_REQUESTS))
    is_full = False
    while not load.done():
        samples = await asyncio.to_thread(served.metrics)
        used = sum(total(samples, "memsvc_page_bytes", state=state) for state in ("private", "tree", "pinned", "limbo"))
        fixed = sum(total(samples, "memsvc_frames", state=state) for state in ("dummy", "exchange"))
        is_full = is_full or total(samples, "memsvc_evicted_pages_total") + total(samples, "memsvc_no_room_total") > 0
        if is_full:
            used += fixed * total(samples, "memsvc_frame_bytes")
            shares.append(used / total(samples, "memsvc_arena_bytes"))
        await asyncio.sleep(0.05)
    await load
    return shares
