"""Prompts through buckets: what they leave in pages, features, slots and results is what eager steps leave."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.kv_dtype import FP8_E4M3
from target_worker.cuda import prompts
from target_worker.cuda.order import Chunk, Order
from target_worker.cuda.prompt_graphs import PromptPlaces
from target_worker.cuda.prompts import PromptRows, PromptStep
from target_worker.plan import StepPlan
from target_worker.step_sizes import prompt_buckets, prompts_of
from tests.support.device_target import PAGE_SIZE, DeviceTarget
from tests.support.prompt_pair import BLOCK_SIZE, BUCKETS, TAPS, PromptPair
from tests.support.tiny_target import make_target

LONG = [5, 9, 11, 60, 3, 8, 8, 21, 4, 33, 7, 2, 70, 71, 72, 9, 1, 55]
SAMPLED = {"temperature": 0.9, "top_p": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_target(
        folder, "Qwen3", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        hidden_size=32, intermediate_size=48,
    )  # fmt: skip
    return folder


@pytest.fixture
def eager_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the prompts that went through no bucket."""
    sizes: list[int] = []
    run = PromptStep.run

    def noted(self: PromptStep, chunks: Sequence[Chunk], feature_row: int) -> torch.Tensor | None:
        sizes.append(sum(len(chunk.token_ids) for chunk in chunks))
        return run(self, chunks, feature_row)

    monkeypatch.setattr(PromptStep, "run", noted)
    return sizes


@pytest.fixture(autouse=True)
def rows_that_nobody_attends_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come out of the kernel as anything."""
    attend = prompts.prefill_attention

    def poisoned(q: torch.Tensor, *rest: object) -> torch.Tensor:
        out = attend(q, *rest)
        plan = rest[-1]
        assert isinstance(plan, prompts.PrefillPlan)
        rows, (_, _, nums, firsts) = torch.arange(len(q), device=q.device), plan.tiles.T[:, :, None]
        attended = ((rows >= firsts) & (rows < firsts + nums)).any(0)
        return out.masked_fill(~attended[:, None, None], torch.nan)

    monkeypatch.setattr(prompts, "prefill_attention", poisoned)


@pytest.fixture(params=[TAPS, (0,)], ids=["last layer tapped", "last layer for some rows"])
def pair(request: pytest.FixtureRequest, folder: Path, device: str) -> PromptPair:
    return PromptPair(folder, device, request.param)


def test_one_prompt_then_its_answer(pair: PromptPair, eager_sizes: list[int]) -> None:
    pair.open(1, LONG[:11])
    pair.step({1: 11})
    pair.step({}, [1])
    assert eager_sizes == [11]


def test_prompts_in_chunks_of_which_some_end_beside_others_that_do_not(
    pair: PromptPair, eager_sizes: list[int]
) -> None:
    for rid, prompt in ((1, LONG[:9]), (2, LONG[3:5]), (3, LONG[7:16])):
        pair.open(rid, prompt)
    pair.step({1: 4})
    pair.step({1: 5, 3: 4, 2: 2})
    # The bucket that gave two tokens gives one, and those two move on by blocks alone.
    pair.step({3: 5}, [1, 2], [7, 9])
    pair.step({}, [1, 2, 3])
    assert eager_sizes == [4, 11, 5]


@pytest.mark.parametrize("num", [1, 7, 8, 9, 16])
def test_any_number_of_rows_up_to_the_largest_bucket(
    folder: Path, device: str, num: int, eager_sizes: list[int]
) -> None:
    pair = PromptPair(folder, device, taps=())
    pair.open(1, LONG[:num])
    pair.step({1: num})
    assert eager_sizes == [num], "of the target that has no buckets"
    if num in BUCKETS and device == "cpu":
        assert all(map(torch.equal, pages_of(pair.graphed), pages_of(pair.eager))), "by products of the same form"


def test_one_row_more_than_the_largest_bucket_is_run_eagerly(folder: Path, device: str, eager_sizes: list[int]) -> None:
    pair = PromptPair(folder, device)
    pair.open(1, LONG[:17])
    pair.step({1: 17})
    assert eager_sizes == [17, 17]


def test_more_prompts_than_a_bucket_has_room_for_take_a_larger_one_or_none(
    folder: Path, device: str, eager_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = PromptPair(folder, device)
    graphs = pair.graphed.work._parts.prompt_graphs
    assert graphs is not None
    taken, bucket = [], graphs._graphs.bucket
    monkeypatch.setattr(graphs._graphs, "bucket", lambda size: taken.append(size) or bucket(size))
    for rid in (1, 2, 3, 4, 5):
        pair.open(rid, LONG[rid : rid + 2])
    assert [prompts_of(size, 5) for size in BUCKETS] == [2, 4]
    pair.step({1: 1, 2: 1})
    pair.step({1: 1, 2: 1, 3: 1})
    pair.step({3: 1, 4: 1, 5: 1}, [1, 2])
    assert (taken, eager_sizes) == ([8, 16, 16], [2, 3, 3])


def test_the_rest_of_a_prompt_whose_prefix_was_found(pair: PromptPair, eager_sizes: list[int]) -> None:
    pair.open(1, LONG[:10])
    pair.step({1: 10})
    pair.open(2, [*LONG[:8], 44, 45, 46], prefix_of=1, num_cached=8)
    pair.open(3, [*LONG[:4], 47], prefix_of=1, num_cached=4)
    pair.step({2: 3, 3: 1}, [1], [5, 6])
    pair.step({}, [1, 2, 3])
    assert eager_sizes == [10, 4]


def test_tokens_are_drawn_as_eager_steps_draw_them(folder: Path, device: str) -> None:
    pair = PromptPair(folder, device)
    pair.open(1, LONG[:9], **SAMPLED)
    pair.open(2, LONG[2:5], temperature=1.3, top_k=20, min_p=0.01)
    pair.open(3, LONG[4:6])
    pair.step({1: 9, 2: 3, 3: 2})
    pair.step({}, [1, 2, 3])


def test_pages_of_8_bits(folder: Path, device: str) -> None:
    pair = PromptPair(folder, device, kv=FP8_E4M3)
    pair.open(1, LONG[:9])
    pair.open(2, LONG[2:5])
    pair.step({1: 5, 2: 3})
    pair.step({1: 4}, [2])


def test_an_answer_of_one_token_and_a_stop_end_in_the_bucket(folder: Path, device: str) -> None:
    pair = PromptPair(folder, device)
    pair.open(1, LONG[:9], max_tokens=1)
    pair.open(2, LONG[2:5], min_tokens=0, stop_token_ids=list(range(0, 60)))
    pair.step({1: 9, 2: 3})
    assert pair.graphed.slots.done[1:3].tolist() != [0, 0]


def test_a_slot_that_was_closed_meanwhile_gets_no_token(folder: Path, device: str) -> None:
    pair = PromptPair(folder, device)
    pair.open(1, LONG[:5])
    pair.open(2, LONG[5:8])
    pair.step({1: 5})
    slots = [pair.reqs[rid][0].row for rid in (1, 2)]
    read = []
    for target in (pair.graphed, pair.eager):
        target.executor.close(slots[0])
        chunks = [Chunk(slots[1], 0, LONG[5:8], True), Chunk(slots[0], 5, LONG[5:7], True)]
        results = target.work.put(Order(clear=[], members=[], chunks=chunks), lambda: None)
        read.append(results.read(target.wait))
    # Nobody has opened the other one.
    assert read == [[[], []]] * 2
    pair.check(5)


def pages_of(target: DeviceTarget) -> list[torch.Tensor]:
    """Keys and values of all layers in int32, but for the dummy page's."""
    pool = target.memory.pool
    with target.lane.running():
        return [part(layer)[1:].view(torch.int32).clone() for layer in (0, 1) for part in (pool.k, pool.v)]


def test_rows_of_nobody_touch_no_page_and_no_feature_of_others(folder: Path, device: str) -> None:
    pair = PromptPair(folder, device)
    target = pair.graphed
    pair.open(1, LONG[:9])
    pair.step({1: 9})
    pair.open(2, LONG[3:8])
    assert target.features is not None
    before = pages_of(target)
    with target.lane.running():
        target.features.fill_(7.0)
    pair.step({2: 5}, [1])
    first, end = BLOCK_SIZE, BLOCK_SIZE + 5
    assert bool((target.features[first + 8 :] == 7.0).all()), "a bucket of eight rows"
    assert bool(target.features[first:end].isfinite().all())
    assert not bool((target.features[:end] == 7.0).any())
    written = set()
    for old, new in zip(before, pages_of(target), strict=True):
        written |= {(int(page) + 1, int(offset)) for page, offset in (old != new).flatten(2).any(2).nonzero()}
    one, two = (target.tables.table[pair.reqs[rid][0].row].tolist() for rid in (1, 2))
    places = [(one, at) for at in range(9, 9 + BLOCK_SIZE)] + [(two, at) for at in range(5)]
    assert written == {(pages[at // PAGE_SIZE], at % PAGE_SIZE) for pages, at in places}


def test_a_bucket_that_would_reach_past_the_exchange_is_not_taken(
    folder: Path, device: str, eager_sizes: list[int]
) -> None:
    target = DeviceTarget(folder, device, block_size=BLOCK_SIZE, taps=TAPS, prompt_buckets=BUCKETS)
    assert target.features is not None
    graphs = target.work._parts.prompt_graphs
    assert graphs is not None
    chunk = [Chunk(0, 0, [1] * 5, False)]
    with target.lane.running(), torch.inference_mode():
        assert graphs.run(chunk, len(target.features) - 7) is None
        assert graphs.run(chunk, len(target.features) - 8) is not None
    target.lane.drain(1.0)


def test_rows_that_see_much_are_run_eagerly_where_that_is_another_kernel(folder: Path, device: str) -> None:
    graphs = DeviceTarget(folder, device, prompt_buckets=BUCKETS).work._parts.prompt_graphs
    assert graphs is not None
    chunks = [Chunk(1, 0, [1] * 4, True), Chunk(2, 30, [1, 2], True)]
    sizes = []
    for most in (0, 31, 32):
        graphs._limits = replace(graphs._limits, most_context=most)
        sizes.append(graphs.size_for(chunks, 0))
    assert sizes == [8, None, 8]


def test_two_flights_may_be_out_and_a_step_leaves_the_results_of_the_one_before(folder: Path, device: str) -> None:
    pair = PromptPair(folder, device)
    for rid in (1, 2, 3):
        pair.open(rid, LONG[rid : rid + 3])
    found = []
    for target, of in ((pair.graphed, 0), (pair.eager, 1)):
        one, two, three = (pair.reqs[rid][of] for rid in (1, 2, 3))
        first = target.submit(StepPlan(chunks={one: 3, two: 3}))
        second = target.submit(StepPlan(decode=[two, one], chunks={three: 3}))
        found.append([target.collect(first), target.collect(second)])
    texts = [[{req.rid: tokens for req, tokens in step.items()} for step in steps] for steps in found]
    assert texts[0] == texts[1]
    assert [sorted(step) for step in texts[0]] == [[1, 2], [1, 2, 3]]
    pair.check(0)


def test_tokens_that_are_none_are_refused_before_anything_is_enqueued(folder: Path, device: str) -> None:
    target = DeviceTarget(folder, device, prompt_buckets=BUCKETS)
    with pytest.raises(ValueError, match=r"token ids 3 to 1000 in a vocabulary of"):
        target.work.put(Order(clear=[], members=[], chunks=[Chunk(1, 0, [3, 1000], False)]), lambda: None)


def test_inputs_of_a_step_are_all_that_is_left_in_a_bucket() -> None:
    places = PromptPlaces.make(6, 2, 4, "cpu")
    rows = PromptRows(np.arange(9).reshape(3, 3) + 1, [], [2, 1], [4, 5])
    tiles = np.array([[4, 0, 2, 0], [5, 0, 1, 2]], dtype=np.int32)
    for _ in range(2):
        places.inputs.copy_(torch.from_numpy(places.host_inputs(rows, tiles, 11)))
    assert places.first_row.tolist() == [11]
    assert places.columns.tolist() == [[1, 2, 3, 0, 0, 0], [4, 5, 6, 0, 0, 0], [7, 8, 9, 0, 0, 0]]
    assert places.wanted.tolist() == [2, 1]
    found, members = places.tiles_and_members()
    assert found.tolist() == [*tiles.tolist(), [0] * 4]
    assert members.tolist() == [4, 5]
    places.inputs.copy_(torch.from_numpy(places.host_inputs(PromptRows(rows.columns[:, :1], [], [], []), tiles[:1], 0)))
    assert int((places.inputs != 0).sum()) == 3 + 2
    assert places.columns.data_ptr() % 16 == places.tiles_and_members()[0].data_ptr() % 16 == 0


@pytest.mark.parametrize(
    ("most", "backend", "sizes"),
    [
        (8192, "auto", (32, 64, 128, 192, 256, 384, 512)),
        (512, "triton", (32, 64, 128, 192, 256, 384, 512)),
        (200, "auto", (32, 64, 128, 192, 200)),
        (4, "auto", (4,)),
        (2048, "flashinfer", ()),
        (2048, "torch", ()),
    ],
)
def test_what_is_captured(most: int, backend: str, sizes: tuple[int, ...]) -> None:
    assert prompt_buckets(most, backend) == sizes
    assert [prompts_of(size, 64) for size in (1, 32, 128, 512)] == [1, 8, 32, 32]
    assert prompts_of(512, 5) == 5


def test_every_cut_of_a_buckets_rows_into_prompts_has_tiles(folder: Path) -> None:
    for tile_tokens in (1, 5, 32, 128):
        for num_rows, num_prompts in ((32, 8), (100, 25), (512, 32)):
            places = PromptPlaces.make(num_rows, num_prompts, tile_tokens, "cpu")
            lens = [tile_tokens + 1] * (num_prompts - 1)
            lens = [num for i, num in enumerate(lens) if sum(lens[: i + 1]) < num_rows]
            lens.append(num_rows - sum(lens))
            assert sum(-(-num // tile_tokens) for num in lens) <= places.num_tiles
