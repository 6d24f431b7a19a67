"""Buckets of a step and the padding of their places; replays are tested where a CUDA device is."""

import pytest
import torch

from memsvc.device.buckets import bucket_sizes, most_places
from memsvc.device.graphs import ALL, Bucket, BucketGraphs, GraphPlan, GraphPool, Places, SizedGraphs


@pytest.mark.parametrize(
    ("max_bs", "max_reqs", "sizes"),
    [
        (64, 64, (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)),
        (64, 1, (1,)),
        (64, 3, (1, 2, 4)),
        (64, 20, (1, 2, 4, 8, 12, 16, 24)),
        (20, 64, (1, 2, 4, 8, 12, 16, 20)),
        (3, 64, (1, 2, 3)),
        (128, 100, (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)),
        (100, 200, (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100)),
        (0, 5, ()),
    ],
)
def test_every_batch_that_is_captured_fits_a_bucket_and_none_is_too_large(max_bs, max_reqs, sizes):
    assert bucket_sizes(max_bs, max_reqs) == sizes


def test_the_largest_batch_is_a_bucket_or_all_requests_at_once():
    assert [most_places(64, 20), most_places(20, 64), most_places(64, 64), most_places(0, 5)] == [24, 64, 64, 5]


def test_places_nobody_stands_at_hold_the_dummy_slot():
    places = Places.make(4, 2, "cpu")
    assert places.host_inputs([7, 3], [5, 9]).tolist() == [7, 3, 0, 0, 5, 9]
    places.inputs.copy_(torch.from_numpy(places.host_inputs([7], [5, 9])))
    assert (places.members.tolist(), places.numbers.tolist()) == ([7, 0, 0, 0], [5, 9])


def test_a_batch_takes_the_smallest_bucket_that_holds_it_and_its_own_size_past_the_last():
    made = []
    plan = GraphPlan(sizes=(1, 2, 4), sections=("a",), num_numbers=1, is_captured=False)
    graphs = BucketGraphs(plan, lambda places: made.append(places.size) or (lambda: iter(("a",))), "cpu")
    assert [graphs.bucket(num).places.size for num in (3, 1, 4, 2, 5, 3, 5)] == [4, 1, 4, 2, 5, 4, 5]
    assert made == [4, 1, 2, 5], "each once"


def test_sections_are_told_of_in_order():
    heard = []
    Bucket(Places.make(1, 0, "cpu"), lambda: iter(("a", "b"))).run(heard.append)
    assert heard == ["a", "b"]


@pytest.mark.gpu
@pytest.mark.parametrize("is_split", [False, True])
def test_a_replay_computes_what_the_step_computes(is_split):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    total = torch.zeros(8, device="cuda")

    def make_turn(places):
        def turn():
            doubled = places.members * 2
            yield "double"
            total[: places.size] = doubled + places.numbers
            yield "add"

        return turn

    plan = GraphPlan(sizes=(2, 8), sections=("double", "add"), num_numbers=1, is_split=is_split)
    graphs = BucketGraphs(plan, make_turn, "cuda")
    graphs.capture()
    for members in ([3], [1, 2, 3, 4, 5], [4, 2]):
        bucket = graphs.bucket(len(members))
        heard = []
        with torch.inference_mode():
            bucket.places.inputs.copy_(torch.from_numpy(bucket.places.host_inputs(members, [10])))
            bucket.run(heard.append)
        assert heard == (["double", "add"] if is_split else [ALL])
        assert total[: len(members)].tolist() == [2 * member + 10 for member in members]


def test_inputs_of_any_form_have_buckets_of_their_own():
    made = []
    plan = GraphPlan(sizes=(2, 4), sections=("a",), is_captured=False)

    def make_bucket(size):
        made.append(size)
        return Bucket([0] * size, lambda: iter(("a",)))

    graphs = SizedGraphs(plan, make_bucket, "cpu")
    graphs.capture()
    assert [len(graphs.bucket(num).places) for num in (1, 3, 2, 7)] == [2, 4, 2, 7]
    assert (made, graphs.capture_s, graphs.num_bytes) == ([2, 4, 7], 0.0, 0)


@pytest.mark.gpu
def test_graphs_of_two_steps_share_a_pool_and_take_turns():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    width = 1 << 20
    found = {name: torch.zeros(8, width, device="cuda") for name in ("a", "b")}

    def make_bucket(name):
        def make(size):
            inputs = torch.zeros(size, device="cuda")

            def turn():
                wide = inputs[:, None].expand(size, width) + 1
                # Two of these are alive at once, in memory that the other step's graphs use too.
                for _ in range(4):
                    wide = wide * 2
                found[name][:size] = wide
                yield name

            return Bucket(inputs, turn)

        return make

    pool = GraphPool.make(torch.cuda.Stream())
    both = {
        name: SizedGraphs(GraphPlan(sizes=(2, 8), sections=(name,), of=name), make_bucket(name), "cuda")
        for name in found
    }
    for graphs in both.values():
        graphs.capture(pool)
    wide_bytes = 8 * width * 4
    assert both["a"].num_bytes >= 2 * wide_bytes
    assert both["b"].num_bytes < wide_bytes, "what the first took is used again"
    for name, num in (("a", 8), ("b", 2), ("a", 1), ("b", 8)):
        values = torch.arange(num, device="cuda") + 10.0
        with torch.inference_mode():
            bucket = both[name].bucket(num)
            bucket.places[:num] = values
            bucket.run()
        assert torch.equal(found[name][:num], ((values + 1) * 16)[:, None].expand(num, width))
