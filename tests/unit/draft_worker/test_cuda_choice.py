"""Which tokens the draft step on kernels chooses, and of how many requests and drafts: as draft_worker.propose does."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from draft_worker.cuda.worker import PlanWorker
from memsvc.wire.spec import Planned
from memsvc.wire.text import Sampling
from tests.support.make_drafter import V1, V2
from tests.support.plan_rig import merged
from tests.support.small_plans import NUM_DRAFTS, assert_same_drafts, small_rig

SAMPLED = Sampling(seed=-7, max_tokens=64, temperature=0.8, top_k=9, top_p=0.9)
PENALISED = Sampling(seed=5, max_tokens=64, temperature=1.2, repetition_penalty=1.3, presence_penalty=0.4, min_p=0.05)


@pytest.mark.parametrize(("version", "sampling"), [(V2, SAMPLED), (V1, PENALISED)], ids=["v2-filters", "v1-penalties"])
def test_sampled_drafts_take_the_noise_and_the_parameters_of_their_request(version, sampling, tmp_path, device):
    rig = small_rig(tmp_path, version, device)
    opened = merged(rig.open(1, 6, sampling=sampling), rig.open(2, 2, sampling=sampling))
    assert_same_drafts(rig, [2, 1], sampling=sampling, **opened)


def test_a_reduced_vocabulary_gives_token_ids(tmp_path, device):
    rig = small_rig(tmp_path, V1, device)
    model = rig.worker._model
    order = torch.randperm(rig.cpu.shape.vocab_size, generator=torch.Generator().manual_seed(3))[:60]
    for worker_model in {id(model): model, id(rig.cpu.model): rig.cpu.model}.values():
        place = worker_model.head.device
        object.__setattr__(worker_model, "head", worker_model.head[order.to(place)].contiguous())
        object.__setattr__(worker_model, "draft_to_target", order.to(place))
    rig.worker = PlanWorker(rig.worker._config, model, rig.worker._memory, rig.acks.append, rig.worker._maker)
    rig.hello()
    assert_same_drafts(rig, [1], **rig.open(1, 8))


def test_padded_places_and_other_batch_sizes_change_no_draft(tmp_path, device):
    rig = small_rig(tmp_path, V2, device)
    opened = merged(*(rig.open(rid, 2 * rid) for rid in range(1, 4)))
    expected = rig.cpu.propose([1, 2, 3], NUM_DRAFTS)
    assert rig.drafts([1, 2, 3], NUM_DRAFTS, **opened) == expected, "one place of four is nobody's"
    assert rig.drafts([3], NUM_DRAFTS) == expected[2:]


def test_fewer_drafts_than_the_block_has_count_and_no_more(tmp_path, device):
    rig = small_rig(tmp_path, V2, device)
    opened = rig.open(1, 3)
    full = rig.cpu.propose([1], NUM_DRAFTS)
    assert rig.drafts([1], 1, **opened) == [full[0][:1]]
    assert isinstance(rig.plan([1], 0), Planned)
    rig.session.lane.drain(0.0)
    assert int(rig.slots.num_drafts[rig.slot(1)]) == 1, "a turn without drafts leaves the slot alone"
