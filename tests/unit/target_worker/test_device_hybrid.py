"""A hybrid target's steps on a device: the tokens, keys, values, states, ring rows and features of the CPU's runner."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.wire.text import Sampling
from target_worker.cuda import work
from target_worker.plan import StepPlan
from target_worker.req import Phase, Req
from tests.support import kernel_bounds
from tests.support.device_target import PAGE_SIZE, DeviceTarget
from tests.support.hybrid_memory import check_memory, close, cpu_request, settle
from tests.support.tiny_hybrid import SMALLER, HybridRig, make_hybrid
from tests.support.tiny_target import tokens_of

BLOCK_SIZE = 3
NUM_NEW = 9
LINEAR, FULL = "linear_attention", "full_attention"
PROMPTS = {1: tokens_of(1, 11, 61), 2: tokens_of(2, 2, 61), 3: tokens_of(3, 5, 61)}


@pytest.fixture(autouse=True)
def rows_of_one_load_lie_in_ring_and_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_bounds.allow_several_operands(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    make_hybrid(folder, layer_types=[LINEAR, FULL, LINEAR], num_hidden_layers=3, **SMALLER)
    return folder


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[int, list[int]]:
    """What the CPU's runner gives after each prompt, a token at a time."""
    rig, found = HybridRig(folder), {}
    for rid, prompt in PROMPTS.items():
        req, tokens = rig.open(rid, 60), list(prompt)
        for _ in range(NUM_NEW + BLOCK_SIZE):
            tokens.append(int(rig.chunk(req, tokens[len(req.tokens) :])[-1].argmax()))
        found[rid] = tokens[len(prompt) :]
    return found


def greedy(**changes: object) -> Sampling:
    return Sampling(**{"temperature": 0.0, "seed": 1, "max_tokens": 40, "ignore_eos": True} | changes)


@pytest.fixture(params=[1, 1000], ids=["mixed", "apart"])
def mixed_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of so many rows and more are computed together with blocks."""
    monkeypatch.setattr(work, "MIXED_ROWS", request.param)
    return request.param


def drafts_for(req: Req, texts: dict[int, list[int]], num_right: int) -> list[int]:
    """So many right ones, then wrong ones."""
    right = texts[req.rid][req.n_out :][: BLOCK_SIZE - 1]
    return [token if i < num_right else (token + 1) % 61 for i, token in enumerate(right)]


def run_out(target: DeviceTarget, reqs: list[Req], texts: dict[int, list[int]], num_right: int = 2) -> None:
    """Blocks until each has its tokens."""
    while left := [req for req in reqs if req.n_out < NUM_NEW]:
        for req in left:
            target.draft(req, drafts_for(req, texts, num_right))
        target.step(left)
    for req in reqs:
        assert req.tokens[req.prompt_len :][:NUM_NEW] == texts[req.rid][:NUM_NEW]
        assert req.computed_len == len(req.tokens) - 1


@pytest.mark.usefixtures("mixed_rows")
def test_blocks_and_chunks_are_those_of_the_cpu(folder: Path, wanted: dict[int, list[int]], device: str) -> None:
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    one, two, three = (target.open(rid, prompt, 60, greedy()) for rid, prompt in PROMPTS.items())
    # Chunks that end inside a page, begin there, pass none or several edges, beside another's prompt or blocks.
    target.step([], {one: 3})
    target.step([], {one: 2, two: 2})
    target.draft(two, drafts_for(two, wanted, 1))
    target.step([two], {one: 6, three: 1})
    target.draft(one, drafts_for(one, wanted, 0))
    target.step([one, two], {three: 4})
    check_memory(target, three, folder)
    for num_right in (2, 1, 0):
        target.draft(one, drafts_for(one, wanted, num_right))
        target.step([one, three])
        check_memory(target, one, folder)
    run_out(target, [one, two, three], wanted)
    for req in (one, two, three):
        check_memory(target, req, folder)


def test_states_follow_page_edges_and_no_further(folder: Path, wanted: dict[int, list[int]], device: str) -> None:
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    req = target.open(1, PROMPTS[1], 60, greedy())
    target.step([], {req: 11})
    lens = []
    while req.n_out < NUM_NEW:
        target.draft(req, drafts_for(req, wanted, 2))
        before = req.computed_len
        target.step([req])
        assert req.state.length == before // PAGE_SIZE * PAGE_SIZE
        assert int(target.memory.states.mirror.tables.state_len[req.row]) == req.state.length
        lens.append(before % PAGE_SIZE)
    assert len(set(lens)) > 2, "blocks begin at several places of a page"
    check_memory(target, req, folder)


def test_features_are_those_of_the_cpu(folder: Path, wanted: dict[int, list[int]], device: str) -> None:
    taps = (2, 0)
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE, taps=taps)
    req = target.open(1, PROMPTS[1], 60, greedy())
    num = len(PROMPTS[1])
    target.step([], {req: num})
    of_prompt = target.features[:num].clone()
    target.draft(req, wanted[1][1:3])
    target.step([req])
    of_block = target.features[int(target.slots.feature_row[req.row]) :][:BLOCK_SIZE]
    rig, _ = cpu_request(folder, PROMPTS[1] + wanted[1][:BLOCK_SIZE], taps)
    close(torch.cat((of_prompt, of_block)), rig.features[: num + BLOCK_SIZE])


def test_a_request_that_takes_over_a_slot_finds_nothing_there(
    folder: Path, wanted: dict[int, list[int]], device: str
) -> None:
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    first = target.open(1, PROMPTS[1], 60, greedy())
    target.step([], {first: 11})
    run_out(target, [first], wanted)
    row = first.row
    target.close(first)
    second = target.open(3, PROMPTS[3], 60, greedy())
    assert second.row == row
    target.step([], {second: 2})
    target.step([], {second: 3})
    run_out(target, [second], wanted, 1)
    check_memory(target, second, folder)


def test_a_hit_goes_on_from_a_frozen_state_and_leaves_it_as_it_is(
    folder: Path, wanted: dict[int, list[int]], device: str
) -> None:
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    first = target.open(1, PROMPTS[1], 60, greedy())
    target.step([], {first: 11})
    target.draft(first, drafts_for(first, wanted, 2))
    target.step([first])
    settle(target, first)
    length = first.state.length
    text = first.tokens[: length + 1]
    second = target.open(2, [*text, 7], 60, greedy(), hit=first)
    pages = target.linear.table.state_in[second.row].tolist()
    assert pages != target.linear.table.state_out[second.row].tolist()
    assert (
        pages == target.linear.table.state_in[first.row].tolist() != target.linear.table.state_out[first.row].tolist()
    )
    before = target.linear.states.read(torch.tensor(pages, device=device)).clone()
    # The first chunk ends in the page of the state; blocks of both pass its end, from the same pages.
    target.step([first], {second: 2})
    texts = {1: wanted[1], 2: continued(folder, second.tokens[: second.prompt_len])}
    run_out(target, [first, second], texts)
    for req in (first, second):
        check_memory(target, req, folder)
    assert torch.equal(target.linear.states.read(torch.tensor(pages, device=device)), before)


@pytest.mark.parametrize(("length", "num_right"), [(4, 2), (12, 0), (12, 2)])
def test_a_prompt_leaves_its_state_at_the_edge_before_its_last_token(
    folder: Path, wanted: dict[int, list[int]], device: str, length: int, num_right: int
) -> None:
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    prompt, edge = tokens_of(7, length, 61), (length - 1) // PAGE_SIZE * PAGE_SIZE
    other = target.open(3, PROMPTS[3], 60, greedy())
    target.step([], {other: 4})
    first = target.open(1, prompt, 60, greedy())
    target.step([], {first: length, other: 1})
    state_len = target.memory.states.mirror.tables.state_len
    assert int(state_len[first.row]) == first.state.length == edge
    texts = dict.fromkeys((1, 2), continued(folder, prompt)) | {3: wanted[3]}
    assert first.tokens[length:] == texts[1][:1]
    if not edge:
        run_out(target, [first, other], texts, num_right)
        check_memory(target, first, folder)
        return
    # The same prompt again computes what is behind the frozen state, and moves it no further; blocks of both do.
    second = target.open(2, prompt, 60, greedy(), hit=first)
    pages = torch.tensor(target.linear.table.state_in[second.row].tolist(), device=device)
    frozen = target.linear.states.read(pages).clone(), target.linear.states.read_conv(pages).clone()
    rig, alike = cpu_request(folder, prompt[:edge])
    its_own = torch.from_numpy(rig.linear.table.state_in[alike.row]).long()
    for got, want in zip(frozen, (rig.linear.states.read(its_own), rig.linear.states.read_conv(its_own)), strict=True):
        close(got, want)
    target.step([other], {second: length - edge})
    assert int(state_len[second.row]) == second.state.length == edge
    run_out(target, [first, second, other], texts, num_right)
    for req in (first, second):
        check_memory(target, req, folder)
    for got, want in zip(
        (target.linear.states.read(pages), target.linear.states.read_conv(pages)), frozen, strict=True
    ):
        assert torch.equal(got, want)


def continued(folder: Path, prompt: list[int]) -> list[int]:
    rig = HybridRig(folder)
    req, tokens = rig.open(1, 60), list(prompt)
    for _ in range(NUM_NEW + BLOCK_SIZE):
        tokens.append(int(rig.chunk(req, tokens[len(req.tokens) :])[-1].argmax()))
    return tokens[len(prompt) :]


def test_a_retracted_request_goes_on_from_the_state_that_it_gave_away(
    folder: Path, wanted: dict[int, list[int]], device: str
) -> None:
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    req, other = (target.open(rid, PROMPTS[rid], 60, greedy()) for rid in (1, 3))
    target.step([], {req: 11, other: 5})
    for _ in range(2):
        target.draft(req, drafts_for(req, wanted, 1))
        target.step([req, other])
    settle(target, req)
    assert req.state.length > 11
    again = target.open(1 + 3, req.tokens, 60, greedy(), hit=req)
    target.close(req)
    target.step([other], {again: len(again.tokens) - again.computed_len})
    again.prompt_len, again.rid = len(PROMPTS[1]), req.rid
    run_out(target, [again, other], wanted, 1)
    check_memory(target, again, folder)


def test_a_freeze_beside_a_block_that_runs(folder: Path, wanted: dict[int, list[int]], device: str) -> None:
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    req = target.open(3, PROMPTS[3], 60, greedy())
    target.step([], {req: 5})
    target.draft(req, drafts_for(req, wanted, 1))
    # The block reads the state at 4, which is frozen meanwhile; the next one writes that at 8 elsewhere.
    flight = target.submit(StepPlan(decode=[req]))
    frozen = target.freeze(req)
    before = target.linear.states.read(torch.tensor(frozen, device=device)).clone()
    second = target.submit(StepPlan(decode=[req]))
    target.collect(flight)
    third = target.submit(StepPlan(decode=[req]))
    target.collect(second)
    target.collect(third)
    run_out(target, [req], wanted)
    check_memory(target, req, folder)
    assert torch.equal(target.linear.states.read(torch.tensor(frozen, device=device)), before)


def test_two_flights_may_be_out(folder: Path, wanted: dict[int, list[int]], device: str) -> None:
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    req = target.open(1, PROMPTS[1], 60, greedy())
    first = target.submit(StepPlan(chunks={req: 5}))
    second = target.submit(StepPlan(chunks={req: 6}))
    assert target.collect(first) == {}
    assert req.state.length == 4, "as far as results are read"
    third = target.submit(StepPlan(decode=[req]))
    assert target.collect(second) == {req: wanted[1][:1]}
    for _ in range(NUM_NEW):
        fourth = target.submit(StepPlan(decode=[req]))
        target.collect(third)
        third = fourth
    target.collect(third)
    assert req.tokens[req.prompt_len :][:NUM_NEW] == wanted[1][:NUM_NEW]
    check_memory(target, req, folder)


def test_a_request_that_has_ended_moves_no_state_and_can_still_catch_up(
    folder: Path, wanted: dict[int, list[int]], device: str
) -> None:
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE)
    req = target.open(3, PROMPTS[3], 60, greedy(max_tokens=4))
    target.step([], {req: 5})
    target.draft(req, drafts_for(req, wanted, 2))
    assert target.step([req])[req] == wanted[3][1:4]
    assert (req.computed_len, req.state.length) == (8, 4)
    before = target.arena.clone()
    req.phase = Phase.FINISHED
    assert target.step([req]) == {}
    assert req.state.length == 4
    dummy = target.layout.frame_bytes
    assert torch.equal(target.arena[dummy:], before[dummy:])
    assert target.executor.catch_up([req]) == [req]
    assert target.executor.catch_up([req]) == []
    check_memory(target, req, folder)
