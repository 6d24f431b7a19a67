"""The target's step on a device: the tokens, keys, values and features of the CPU's runner, whatever is drafted."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.wire.text import Sampling
from target_worker.cuda import work
from target_worker.plan import StepPlan
from target_worker.req import Phase
from target_worker.runner import Segment
from tests.support.device_target import DeviceTarget
from tests.support.tiny_target import TargetRig, make_target

TAPS = (1, 0)
NUM_NEW = 4
BLOCK_SIZE = 3
PROMPTS = {1: [5, 9, 11, 60, 3, 8, 8, 21, 4], 2: [90, 17], 3: [33, 34, 35, 36, 37]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with as little as there can be of everything: each block of rows of a kernel takes milliseconds."""
    return make_folder("Qwen3", tmp_path_factory)


def make_folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(family)
    make_target(
        folder, family, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        hidden_size=32, intermediate_size=48,
    )  # fmt: skip
    return folder


def greedy(**changes: object) -> Sampling:
    return Sampling(**{"temperature": 0.0, "seed": 1, "max_tokens": 40, "ignore_eos": True} | changes)


def continuations(folder: Path) -> dict[int, list[int]]:
    """What the CPU's runner gives after each prompt, a token at a time."""
    rig = TargetRig(folder)
    found = {}
    for rid, prompt in PROMPTS.items():
        row, tokens = rig.open(rid, 60), list(prompt)
        for _ in range(NUM_NEW):
            start = len(tokens) - 1 if len(tokens) > len(prompt) else 0
            logits = rig.runner.forward([Segment(row, start, tokens[start:], 1)])
            tokens.append(int(logits[0].argmax()))
        found[rid] = tokens[len(prompt) :]
    return found


@pytest.fixture(params=[1, 1000], ids=["mixed", "apart"])
def mixed_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of so many rows and more are computed together with blocks."""
    monkeypatch.setattr(work, "MIXED_ROWS", request.param)
    return request.param


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.usefixtures("mixed_rows")
def test_blocks_and_chunks_give_the_tokens_of_the_cpu(
    family: str, device: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make_folder(family, tmp_path_factory)
    wanted = continuations(folder)
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    reqs = {rid: target.open(rid, prompt, 60, greedy()) for rid, prompt in PROMPTS.items()}
    one, two, three = reqs.values()
    # A prompt in two chunks, the second beside a whole prompt, a third request beside blocks.
    target.step([], {one: 4})
    target.step([], {one: 5, two: 2})
    target.draft(one, [wanted[1][1], 0 if wanted[1][2] else 1])  # a right one, then a wrong one
    target.step([one, two], {three: 5})
    assert one.tokens[len(PROMPTS[1]) :] == wanted[1][:3]
    while left := [rid for rid, req in reqs.items() if len(req.tokens) < len(PROMPTS[rid]) + NUM_NEW]:
        for rid in left:
            target.draft(reqs[rid], wanted[rid][reqs[rid].n_out :][: BLOCK_SIZE - 1])
        target.step([reqs[rid] for rid in left])
    for rid, req in reqs.items():
        assert req.tokens[len(PROMPTS[rid]) :][:NUM_NEW] == wanted[rid]
        assert req.computed_len == len(req.tokens) - 1


def test_features_of_blocks_and_chunks_are_those_of_the_cpu(folder: Path, device: str) -> None:
    wanted = continuations(folder)[1]
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE, taps=TAPS)
    req = target.open(1, PROMPTS[1], 60, greedy())
    num = len(PROMPTS[1])
    target.step([], {req: num})
    of_prompt = target.features[:num].cpu().clone()
    target.draft(req, wanted[1:3])
    target.step([req])
    assert int(target.slots.num_rows[req.row]) == 3
    of_block = target.features[int(target.slots.feature_row[req.row]) :][:3].cpu()
    rig = TargetRig(folder, taps=TAPS)
    rig.runner.forward([Segment(rig.open(1, 60), 0, PROMPTS[1] + wanted[:3], 1)])
    torch.testing.assert_close(torch.cat((of_prompt, of_block)), rig.features[: num + 3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("taps", [TAPS, (0,)], ids=["last layer tapped", "last layer for some rows"])
def test_a_block_beside_a_chunk_has_the_features_of_one_that_is_alone(
    folder: Path, device: str, mixed_rows: int, taps: tuple[int, ...]
) -> None:
    wanted = {rid: tokens[:NUM_NEW] for rid, tokens in continuations(folder).items()}
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE, taps=taps)
    one, three = (target.open(rid, PROMPTS[rid], 60, greedy()) for rid in (1, 3))
    num, more = len(PROMPTS[1]), len(PROMPTS[3])
    target.step([], {one: num})
    target.draft(one, wanted[1][1:3])
    # A chunk that ends no prompt, then one that does.
    flight = target.submit(StepPlan(decode=[one], chunks={three: 2}))
    target.executor.collect(flight, target.wait)
    of_block = target.features[int(target.slots.feature_row[one.row]) :][:3].cpu().clone()
    row = flight.features[three].row
    of_chunk = target.features[row : row + 2].cpu().clone()
    assert one.computed_len == num + 3
    one.tokens.extend(wanted[1][1:])
    assert target.step([], {three: more - 2})[three] == wanted[3][:1]
    rig = TargetRig(folder, taps=taps)
    rig.runner.forward([Segment(rig.open(1, 60), 0, PROMPTS[1] + wanted[1][:3], 1)])
    torch.testing.assert_close(of_block, rig.features[num : num + 3], rtol=1e-4, atol=1e-4)
    rig.runner.forward([Segment(rig.open(3, 60), 0, PROMPTS[3], 1)])
    torch.testing.assert_close(of_chunk, rig.features[:2], rtol=1e-4, atol=1e-4)


def test_a_request_that_has_ended_gets_no_more_tokens_and_writes_no_page(folder: Path, device: str) -> None:
    wanted = continuations(folder)[2]
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    req = target.open(2, PROMPTS[2], 60, greedy(max_tokens=3))
    target.step([], {req: 2})
    target.draft(req, wanted[1:3])
    assert target.step([req])[req] == wanted[1:3]
    before = target.memory.pool.k(0).clone()
    req.phase = Phase.FINISHED
    assert target.step([req]) == {}
    same = torch.eq(target.memory.pool.k(0)[1:].view(torch.int32), before[1:].view(torch.int32))
    assert bool(same.all()), "rows of a request that is done belong on the dummy page"


def test_two_flights_may_be_out(folder: Path, device: str) -> None:
    wanted = continuations(folder)[1]
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    req = target.open(1, PROMPTS[1], 60, greedy())
    first = target.submit(StepPlan(chunks={req: 4}))
    second = target.submit(StepPlan(chunks={req: 5}))
    assert second.ending == [req]
    assert target.executor.collect(first, target.wait) == {}
    third = target.submit(StepPlan(decode=[req]))
    assert target.executor.collect(second, target.wait) == {req: wanted[:1]}
    assert target.executor.collect(third, target.wait) == {req: wanted[1:2]}
