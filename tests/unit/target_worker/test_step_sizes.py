"""What a step may hold, and that the planner keeps to it."""

import pytest

from memsvc.device.attention_backends import CHOICES
from memsvc.wire.base import ReqId
from memsvc.wire.text import Sampling
from target_worker.config import ATTENTION_BACKENDS, TargetConfig
from target_worker.plan import Planner, StepPlan
from target_worker.req import Phase, Req


def config_of(device: str, **changes: int) -> TargetConfig:
    sizes = {"max_running_requests": 20, "num_draft_tokens": 3, "max_prefill_tokens": 50, "cuda_graph_max_bs": 64}
    return TargetConfig(run_dir="", model_path="", device=device, **sizes | changes)


def test_on_the_cpu_chunks_take_what_blocks_leave() -> None:
    sizes = config_of("cpu").sizes
    assert (sizes.feature_rows, sizes.max_places, sizes.max_req_rows) == (80, 20, 80)
    assert [sizes.chunk_tokens(rows) for rows in (0, 60, 80)] == [80, 20, 0]
    assert config_of("cpu", max_prefill_tokens=500).sizes.feature_rows == 500


@pytest.mark.parametrize(("max_bs", "max_places"), [(64, 24), (8, 20), (24, 24)])
def test_on_a_device_chunks_stand_behind_padded_blocks(max_bs: int, max_places: int) -> None:
    sizes = config_of("cuda:0", cuda_graph_max_bs=max_bs).sizes
    assert (sizes.max_places, sizes.feature_rows, sizes.max_req_rows) == (max_places, 4 * max_places + 50, 50)
    assert [sizes.chunk_tokens(rows) for rows in (0, 80)] == [50, 50]


@pytest.mark.parametrize("num_blocks", [0, 1, 17, 20])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_no_step_on_a_device_leaves_more_rows_than_the_exchange_has(num_blocks: int, num_drafts: int) -> None:
    config = config_of("cuda:0")
    reqs = [request(rid, Phase.DECODE, 1) for rid in range(num_blocks)]
    reqs += [request(100 + rid, Phase.PREFILL, 30) for rid in range(4)]
    plan = Planner(config, lambda _: num_drafts).after(StepPlan(), reqs)
    assert len(plan.decode) == num_blocks
    assert sum(plan.chunks.values()) == 50
    padded = next(size for size in (0, *config.sizes.buckets) if size >= num_blocks)
    assert padded * config.block_size + sum(plan.chunks.values()) <= config.sizes.feature_rows


def request(rid: int, phase: Phase, num_tokens: int) -> Req:
    req = Req(ReqId(rid), [1] * num_tokens, num_tokens, Sampling(seed=0, max_tokens=9), 0, "", rid)
    req.phase = phase
    return req


def test_launch_offers_the_backends_that_there_are() -> None:
    assert ATTENTION_BACKENDS == CHOICES
