"""The whole stack on a CUDA device: the CPU's texts, with drafts, with processes killed, with and without MPS."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.card import read_card
from launch.mps import CONTROL
from tests.support.embedded_model import EMBEDDED, EMBEDDED_DRAFT, OPENINGS
from tests.support.make_drafter import V1, make_drafter
from tests.support.served import Answer, Served, chat
from tests.support.tiny_server import CONTEXT, VOCAB, prompt
from tests.support.tiny_target import make_target
from tests.support.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NUM_REQUESTS = 12
READY_S = 300.0
"""Kernels are compiled before it."""
FLAGS = ["--dtype", "float32", "--page-size", "4"]
NOISE_BYTES = 64 << 20
"""By which the free memory of a device differs after a server that has ended."""
HYBRID = ["--model-path", str(EMBEDDED), "--dtype", "float32"]
HYBRID_TOKENS = 32
ON_CUDA = [*FLAGS, "--device", "cuda", "--mem-bytes", "256M", "--max-running-requests", "8"]


@pytest.fixture(scope="module", autouse=True)
def needs_cuda() -> None:
    """A device is there."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a random target and a random drafter."""
    target = tmp_path_factory.mktemp("tiny") / "tiny"
    make_target(
        target, "Llama", vocab_size=VOCAB, max_position_embeddings=CONTEXT, eos_token_id=2, hidden_size=128,
        intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    write_tiny_tokenizer(target, VOCAB, CONTEXT)
    return target, make_drafter(
        tmp_path_factory.mktemp("drafter") / "drafter", target, V1, block_size=4, target_layer_ids=[0, 1, 2],
        num_hidden_layers=2,
    )  # fmt: skip


def work(num: int = NUM_REQUESTS, max_tokens: int = 60) -> list[dict[str, Any]]:
    """Requests of unlike lengths, some with a prefix in common, every second one sampled with its seed."""
    return [
        chat(
            prompt(index % 5, 20 + index * 7), temperature=index % 2, seed=index, max_tokens=max_tokens, ignore_eos=True
        )
        for index in range(num)
    ]


def texts(answers: list[Answer]) -> list[str]:
    return [answer.text for answer in answers]


@pytest.fixture(scope="module")
def wanted(folders: tuple[Path, Path]) -> list[str]:
    """The CPU's texts, without speculation."""
    flags = [*FLAGS, "--model-path", str(folders[0]), "--mem-bytes", "64M", "--speculative-algorithm", "none"]
    with Served(flags) as server:
        return texts(server.chat_all(work(), 4))


def drafting(folders: tuple[Path, Path], *flags: str) -> list[str]:
    """Flags of a server on the device with the drafter."""
    return [*ON_CUDA, "--model-path", str(folders[0]), "--speculative-draft-model-path", str(folders[1]), *flags]


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[Served]:
    with Served(drafting(folders, "--spec-tokens", "3"), ready_s=READY_S) as served:
        yield served


def test_texts_are_the_cpus_at_any_concurrency(server: Served, wanted: list[str]) -> None:
    for concurrency in (1, NUM_REQUESTS):
        assert texts(server.chat_all(work(), concurrency)) == wanted
    server.check_idle()


def test_what_is_taken_of_the_device_is_close_to_the_plan(folders: tuple[Path, Path]) -> None:
    before = read_card("cuda").free
    with Served(drafting(folders, "--spec-tokens", "3"), ready_s=READY_S) as server:
        (line,) = [line for line in server.lines if "device memory taken=" in line]
    # Taken is what the device has less than before the start, whoever took it.
    by_others = abs(read_card("cuda").free - before)
    if by_others > NOISE_BYTES:
        pytest.skip(f"other processes took or gave back {by_others} bytes of the device meanwhile")
    taken, planned = (int(line.split(f"{name}=")[1].split()[0]) for name in ("taken", "planned"))
    assert 0 < taken <= 1.03 * planned, line


@pytest.fixture(scope="module")
def hybrid_wanted() -> list[Answer]:
    """The CPU's answers of both turns, without speculation."""
    with Served([*HYBRID, "--mem-bytes", "64M", "--speculative-algorithm", "none"]) as server:
        return converse(server)


def converse(server: Served) -> list[Answer]:
    """Greedy answers to all openings, then to a second turn that goes on from each."""
    first = server.chat_all([chat(opening, max_tokens=HYBRID_TOKENS) for opening in OPENINGS], 4)
    turns = [(opening, answer.text, "And what comes then?") for opening, answer in zip(OPENINGS, first, strict=True)]
    roles = ("user", "assistant", "user")
    bodies = [
        chat("", messages=[{"role": role, "content": text} for role, text in zip(roles, turn, strict=True)],
             max_tokens=HYBRID_TOKENS)
        for turn in turns
    ]  # fmt: skip
    return first + server.chat_all(bodies, 4)


def check_conversation(answers: list[Answer], wanted: list[Answer]) -> None:
    """The texts are those, and each second turn begins behind a prefix that was kept, state and all."""
    assert texts(answers) == texts(wanted)
    second = answers[len(OPENINGS) :]
    assert all(answer.usage["prompt_tokens_details"]["cached_tokens"] > 0 for answer in second)


@pytest.mark.parametrize("flags", [["--spec-tokens", "3"], ["--spec-tokens", "auto"], ["--disable-cuda-graph"]])
def test_a_hybrid_answers_as_on_the_cpu_and_goes_on_from_its_states(
    hybrid_wanted: list[Answer], flags: list[str]
) -> None:
    on_cuda = ["--device", "cuda", "--mem-bytes", "256M", "--max-running-requests", "8"]
    drafter = ["--speculative-draft-model-path", str(EMBEDDED_DRAFT)]
    with Served([*HYBRID, *on_cuda, *drafter, *flags], ready_s=READY_S) as server:
        answers = converse(server)
        server.check_idle()
    check_conversation(answers, hybrid_wanted)
    assert any(answer.speculative["num_draft_tokens"] > 0 for answer in answers)


def num_recoveries(server: Served) -> int:
    return sum("recovered, all processes serve" in line for line in server.lines)


def await_recovery(server: Served, num_before: int) -> None:
    deadline = time.monotonic() + READY_S
    while num_recoveries(server) == num_before:
        assert time.monotonic() < deadline, "".join(server.lines[-40:])
        time.sleep(0.1)


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_killed_worker_changes_no_text(server: Served, wanted: list[str], role: str) -> None:
    before, num_before = server.child(role), num_recoveries(server)
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.extend(server.chat_all(work(), NUM_REQUESTS)))
    thread.start()
    time.sleep(0.2)
    os.kill(before, signal.SIGKILL)
    thread.join()
    assert texts(answers) == wanted
    await_recovery(server, num_before)
    assert server.child(role) != before
    assert texts(server.chat_all(work(), 4)) == wanted
    server.check_idle()


@pytest.mark.parametrize("flags", [["--spec-trace", "2"], ["--disable-cuda-graph"], ["--spec-tokens", "auto"]])
def test_other_ways_to_run_give_the_same_texts(folders: tuple[Path, Path], wanted: list[str], flags: list[str]) -> None:
    with Served(drafting(folders, "--attention-backend", "triton", *flags), ready_s=READY_S) as server:
        assert texts(server.chat_all(work(), 8)) == wanted
        server.check_idle()
    traced = [line for line in server.lines if "target INFO [spec-phase-dev]" in line]
    assert bool(traced) == ("--spec-trace" in flags)
    # A step of prompts alone has no blocks, n=0, and verifies nothing.
    steps = [
        tuple(int(line.split(f" {name}=")[1].split()[0]) for name in ("n", "verify", "prompts")) for line in traced
    ]
    assert any(num_blocks for num_blocks, _, _ in steps) == bool(traced)
    for num_blocks, verify_us, prompts_us in steps:
        assert verify_us > 0 if num_blocks else prompts_us > verify_us == 0, (num_blocks, verify_us, prompts_us)


def test_under_mps_texts_are_the_same_and_a_killed_worker_restarts_all(
    folders: tuple[Path, Path], wanted: list[str]
) -> None:
    if shutil.which(CONTROL) is None:
        pytest.skip(f"{CONTROL} is not installed")
    with Served(drafting(folders, "--mps", "on", "--spec-tokens", "3"), ready_s=READY_S) as server:
        assert texts(server.chat_all(work(), 8)) == wanted
        pids = {role: server.child(role) for role in ("memsvc", "target", "draft")}
        os.kill(pids["draft"], signal.SIGKILL)
        await_recovery(server, 0)
        assert all(server.child(role) != pid for role, pid in pids.items())
        assert texts(server.chat_all(work(), 8)) == wanted
