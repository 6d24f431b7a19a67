"""The draft step on kernels against draft_worker.propose: same drafts and same draft KV, whatever the drafter is like."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

from draft_worker.cuda.network import DraftStep
from draft_worker.weights import load_model
from memsvc.device.graphs import Places
from memsvc.wire.spec import Planned
from memsvc.wire.text import Sampling
from tests.support.make_drafter import V1, V2
from tests.support.plan_rig import merged
from tests.support.small_plans import NUM_DRAFTS, assert_same_drafts, small_rig

SAMPLED = Sampling(seed=-7, max_tokens=64, temperature=0.8, top_k=9, top_p=0.9)


@pytest.mark.parametrize(
    ("version", "overrides"),
    [
        (V1, {}),
        (V2, {}),
        (V2, {"conv_kernel_size": 3, "attention_bias": True, "partial_rotary_factor": 0.5}),
        (V1, {"attention_sink_bias": True, "attention_value_scale": 0.7, "input_embedding_scale": 1.5}),
        (V2, {"is_causal": True, "output_multiplier": 0.3, "final_logit_softcapping": 2.0}),
    ],
    ids=["v1", "v2", "v2-odd", "v1-scales", "v2-causal-softcap"],
)
def test_prompt_turn_and_later_turns_give_the_drafts_of_the_torch_worker(version, overrides, tmp_path, device):
    rig = small_rig(tmp_path, version, device, num_layers=1 if overrides else 2, **overrides)
    assert_same_drafts(rig, [2, 1], **merged(rig.open(1, 0), rig.open(2, 10, valid_from=7)))
    rig.emit(1, 2)
    assert_same_drafts(rig, [1])


def test_draft_kv_is_what_the_torch_worker_writes_and_nothing_else_changes(tmp_path, device):
    rig = small_rig(tmp_path, V2, device, attention_value_scale=0.7)
    rig.plan([], **merged(rig.open(1, 9), rig.open(2, 5)))
    rig.emit(1, 3)
    rig.emit(2, 1)
    assert isinstance(rig.plan([1, 2]), Planned)
    rig.session.lane.drain(0.0)
    for layer in range(rig.cpu.shape.num_layers):
        for mine, theirs in ((rig.pool.k, rig.cpu.pool.k), (rig.pool.v, rig.cpu.pool.v)):
            # Page 0 is the dummy; whatever was never written is NaN in both.
            torch.testing.assert_close(mine(layer)[1:].cpu(), theirs(layer)[1:], equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("route", ["materialized", "per_request"])
def test_the_other_routes_give_the_same_drafts(route, tmp_path, device):
    rig = small_rig(tmp_path, V2, device, changes={"propose_route": route})
    rig.plan([], **merged(rig.open(1, 7), rig.open(2, 1)))
    rig.emit(1, 2)
    rig.emit(2, 1)
    assert_same_drafts(rig, [2, 1])


@pytest.mark.gpu
def test_graphs_give_the_drafts_of_the_same_kernels_run_one_by_one(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    drafts = []
    for name, changes in {
        "graph": {}, "eager": {"disable_cuda_graph": True}, "split": {"spec_trace": 2},
    }.items():  # fmt: skip
        rig = small_rig(tmp_path / name, V2, "cuda", num_layers=2, changes=changes)
        opened = merged(*(rig.open(rid, 3 * rid, sampling=SAMPLED) for rid in range(1, 8)))
        made = [rig.drafts(list(range(1, 8)), NUM_DRAFTS, **opened)]
        for num in (1, 2, 3, 5, 7, 2, 4):
            rids = list(range(1, num + 1))
            for rid in rids:
                rig.emit(rid, 1 + rid % 3)
            made.append(rig.drafts(rids, NUM_DRAFTS))
        drafts.append(made)
    assert drafts[0] == drafts[1] == drafts[2]


@pytest.mark.parametrize("version", [V1, V2])
def test_bfloat16_is_rounded_where_the_torch_model_rounds(version, tmp_path, device):
    """Nearly all numbers are the same bits; a sum in another order may round the others to their neighbours."""
    rig = small_rig(tmp_path, version, device)
    model = load_model(replace(rig.worker._config, dtype="bfloat16"), rig.cpu.shape)
    anchors, lengths = torch.tensor([5, 90], device=device), torch.tensor([3, 700], device=device)
    rig.slots.anchor[1:3], rig.slots.length[1:3] = anchors.int(), lengths.int()
    places = Places.make(2, 1, device)
    places.members.copy_(torch.tensor([1, 2]))

    def attend(_layer, q, k, v, _sink):
        parts = (part.transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(*parts, enable_gqa=True).transpose(1, 2)

    with torch.inference_mode():
        rows = DraftStep(model, rig.session.memory, NUM_DRAFTS, (2,))._rows(places, attend)
        positions = lengths[:, None] + torch.arange(1 + NUM_DRAFTS, device=device)
        expected = model.rows(anchors, positions, attend)[:, 1:].flatten(0, 1)
    assert rows.dtype == torch.bfloat16
    assert (rows == expected).float().mean() > 0.9
    torch.testing.assert_close(rows, expected, rtol=2e-2, atol=2e-2)
