"""The batched, paged forward against a dense oracle, for every kind of drafter."""

from typing import Any

import pytest
import torch

from memsvc.wire.base import ReqId
from tests.support.draft_rig import DraftRig
from tests.support.make_drafter import V1, V2

SLIDING, FULL = "sliding_attention", "full_attention"

DRAFTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "v1_full": (V1, {}),
    "v1_causal_by_override": (V1, {"causal": True}),
    "v1_mixed_causality_by_layer_type": (
        V1,
        {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 11},
    ),
    "v1_window_smaller_than_the_block": (V1, {"layer_types": [SLIDING] * 3, "sliding_window": 5, "is_causal": False}),
    "v1_biases_and_sink": (V1, {"attention_bias": True, "attention_sink_bias": True}),
    "v1_scalars": (
        V1,
        {
            "input_embedding_scale": 0.4,
            "output_multiplier": 0.3,
            "final_logit_softcapping": 6.0,
            "attention_value_scale": 0.7,
        },
    ),
    "v1_partial_interleaved_rope": (V1, {"partial_rotary_factor": 0.5, "is_neox_style": False}),
    "v1_no_groups": (V1, {"num_key_value_heads": 6}),
    "v2_sliding_non_causal": (V2, {"sliding_window": 14}),
    "v2_sliding_causal": (V2, {"sliding_window": 9, "is_causal": True}),
    "v2_full_with_three_taps": (V2, {"layer_types": [FULL] * 3, "conv_kernel_size": 3, "conv_group_size": 8}),
    "v2_sink_in_windows": (V2, {"sliding_window": 10, "attention_sink_bias": True}),
    "v2_scalars": (V2, {"output_multiplier": 0.2, "final_logit_softcapping": 5.0, "input_embedding_scale": 1.5}),
    "v2_heads_unlike_the_target": (V2, {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20}),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_of_a_mixed_batch_equal_the_dense_oracle(name, tmp_path):
    version, overrides = DRAFTERS[name]
    rig = DraftRig(tmp_path, version, **overrides)
    # Shorter and longer than every window, on and off page edges, a request without context, a late start.
    for rid, (context_len, valid_from) in enumerate([(23, 0), (4, 0), (0, 0), (33, 18), (8, 3)]):
        rig.open(rid, context_len, valid_from)
    rids = [3, 0, 2, 4, 1]
    drafts = rig.propose(rids, 7)
    for rid, tokens in zip(rids, drafts, strict=True):
        assert tokens == rig.expected(rid, 7), f"request {rid}"


@pytest.mark.parametrize("version", [V1, V2])
def test_all_routes_give_equal_tokens(version, tmp_path):
    rig = DraftRig(tmp_path, version, sliding_window=13)
    for rid, context_len in enumerate([29, 7, 14, 0, 61]):
        rig.open(rid, context_len)
    rids = [0, 1, 2, 3, 4]
    paged = rig.propose(rids, 7)
    assert rig.propose(rids, 7, route="materialized") == paged
    assert rig.propose(rids, 7, route="per_request") == paged


def test_a_request_drafts_the_same_alone_shuffled_and_padded(tmp_path):
    rig = DraftRig(tmp_path, V2, sliding_window=13)
    for rid, context_len in enumerate([29, 7, 40]):
        rig.open(rid, context_len)
    alone = [rig.propose([rid], 7)[0] for rid in range(3)]
    assert rig.propose([2, 0, 1], 7) == [alone[2], alone[0], alone[1]]
    assert rig.propose([0, 1, 2], 7, buckets=(1, 2, 4, 8)) == alone
    assert rig.propose([1], 7, buckets=(8,)) == alone[1:2]


def test_requests_of_very_different_lengths_are_gathered_apart_and_give_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("draft_worker.attention.FEW_PAGES", 1)
    rig = DraftRig(tmp_path, V1)
    for rid, context_len in enumerate([60, 3, 24, 0, 55, 9]):
        rig.open(rid, context_len)
    drafts = rig.propose(list(range(6)), 7)
    for rid, tokens in enumerate(drafts):
        assert tokens == rig.expected(rid, 7)


@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_fewer_rows_than_trained_is_a_shorter_block(version, num_drafts, tmp_path):
    rig = DraftRig(tmp_path, version)
    rig.open(0, 19)
    rig.open(1, 6)
    drafts = rig.propose([0, 1], num_drafts)
    assert drafts == [rig.expected(0, num_drafts), rig.expected(1, num_drafts)]


def test_no_drafts_and_no_blocks_are_fine(tmp_path):
    rig = DraftRig(tmp_path, V1)
    rig.open(0, 5)
    assert rig.propose([0], 0) == [[]]
    assert rig.propose([], 7) == []


def test_a_block_writes_nothing_to_the_pool(tmp_path):
    rig = DraftRig(tmp_path, V2)
    rig.open(0, 21)
    before = rig.arena.clone()
    rig.propose([0], 7)
    assert torch.equal(rig.arena, before)


@pytest.mark.parametrize("route", ["paged", "materialized"])
def test_pages_below_the_window_may_be_gone(route, tmp_path):
    rig = DraftRig(tmp_path, V2, sliding_window=12)
    rig.open(0, 37)
    kept = rig.propose([0], 7, route=route)
    # Row 0 reads [26, 37): pages 0 to 5 hold nothing above position 23.
    for index in range(6):
        rig.tables.set(ReqId(0), index, 0)
    assert rig.propose([0], 7, route=route) == kept
    assert kept[0] == rig.expected(0, 7)


def test_valid_from_hides_what_lies_before_it(tmp_path):
    rig = DraftRig(tmp_path, V1)
    rig.open(0, 30)
    whole = rig.expected(0, 7)
    rig.features[0] = {position: feature for position, feature in rig.features[0].items() if position >= 17}
    partial = rig.expected(0, 7)
    assert rig.propose([0], 7) == [partial]
    assert partial != whole, "the test needs a context whose beginning matters"


def test_a_tied_head_and_bfloat16_weights_run(tmp_path):
    rig = DraftRig(tmp_path, V2, tied=True, dtype="bfloat16")
    rig.open(0, 12)
    assert rig.propose([0], 7) == [rig.expected(0, 7)]


def test_dummy_requests_stand_on_the_dummy_row_with_token_zero_and_no_context(tmp_path):
    rig = DraftRig(tmp_path, V1)
    rig.open(0, 9)
    padded = rig.batch([0], 3).padded(4)
    assert padded.rows.tolist()[1:] == [0, 0, 0]
    assert padded.anchors.tolist()[1:] == [0, 0, 0]
    assert padded.context_len == 9
    assert padded.positions.tolist()[1:] == [[0, 1, 2, 3]] * 3
