"""Draft KV in e4m3: drafts are the oracle's over a rounded context, a block's own rows stay as they are."""

from typing import Any

import pytest
import torch

from draft_worker.propose import Proposer
from memsvc.device.fp8_pages import rounded
from memsvc.device.kv_dtype import FP8_E4M3
from memsvc.wire.base import ReqId
from tests.support.draft_rig import PAGE_SIZE, DraftRig
from tests.support.make_drafter import V1, V2

SLIDING, FULL = "sliding_attention", "full_attention"
E4M3 = torch.float8_e4m3fn

DRAFTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (V1, {}),
    "causal": (V1, {"causal": True}),
    "mixed": (V1, {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 11}),
    "biases_and_sink": (V1, {"attention_bias": True, "attention_sink_bias": True}),
    "scaled_values": (V1, {"attention_value_scale": 0.7}),
    "values_past_448": (V1, {"attention_value_scale": 3000.0}),
    "sliding_causal": (V2, {"sliding_window": 9, "is_causal": True}),
    "sink_in_windows": (V2, {"sliding_window": 10, "attention_sink_bias": True}),
}
CONTEXTS = [(23, 0), (4, 0), (0, 0), (33, 18), (8, 3)]


@pytest.mark.parametrize("route", ["paged", "materialized", "per_request"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_the_oracles_over_a_rounded_context(name: str, route: str, tmp_path: Any) -> None:
    version, overrides = DRAFTERS[name]
    rig = DraftRig(tmp_path, version, kv=FP8_E4M3, **overrides)
    assert rig.pool.shape.dtype == E4M3
    for rid, (context_len, valid_from) in enumerate(CONTEXTS):
        rig.open(rid, context_len, valid_from)
    rids = [3, 0, 2, 4, 1]
    drafts = rig.propose(rids, 7, route=route)
    for rid, tokens in zip(rids, drafts, strict=True):
        assert tokens == rig.expected(rid, 7), f"request {rid}"


@pytest.mark.parametrize("name", ["full", "sink_in_windows", "values_past_448"])
@pytest.mark.parametrize("route", ["paged", "materialized"])
def test_rows_are_the_oracles_and_not_those_of_a_context_that_is_not_rounded(
    name: str, route: str, tmp_path: Any
) -> None:
    version, overrides = DRAFTERS[name]
    rig = DraftRig(tmp_path, version, kv=FP8_E4M3, **overrides)
    rig.open(0, 23)
    proposer = Proposer(rig.model, rig.pool, rig.tables, route)
    with torch.inference_mode():
        got = proposer._rows(rig.batch([0], 7))[0]
    rows = []
    for kept in (rig.oracle.kept, lambda x: x):
        rig.oracle.kept = kept
        context = [(at, rig.oracle.context_kv(feature, at)) for at, feature in sorted(rig.features[0].items())]
        rows.append(rig.oracle.rows(context, rig.tokens[0][-1], 23, 7)[1:])
    want, plain = rows
    moved = (plain - want).norm()
    assert moved > 1e-4 * want.norm()
    assert (got - want).norm() < moved / 20


def test_a_requests_pages_hold_its_context_rounded_and_nothing_else_is_written(tmp_path: Any) -> None:
    rig = DraftRig(tmp_path, V2, kv=FP8_E4M3)
    rig.open(0, 21, 5)
    table = rig.tables.table[rig.tables.row(ReqId(0))].long()
    for position, feature in rig.features[0].items():
        page, offset = int(table[position // PAGE_SIZE]), position % PAGE_SIZE
        at = torch.tensor([position])
        with torch.inference_mode():
            k, v = rig.model.context(feature[None], at)
        for layer in range(rig.shape.num_layers):
            for pages, row in ((rig.pool.k(layer), k[0, layer]), (rig.pool.v(layer), v[0, layer])):
                # One row alone and many at once: K may lie on another side of a tie.
                apart = pages[page, offset].view(torch.uint8).int() - rounded(row).view(torch.uint8).int()
                assert int(apart.abs().max()) <= 1
    numbers = int((~rig.pool.pages.float().isnan()).sum())
    assert numbers == 16 * rig.pool.shape.token_bytes
    before = rig.arena.clone()
    rig.propose([0], 7)
    assert torch.equal(rig.arena, before)


def test_windows_and_dummy_requests_are_as_over_other_pages(tmp_path: Any) -> None:
    rig = DraftRig(tmp_path, V2, sliding_window=12, kv=FP8_E4M3)
    rig.open(0, 37)
    rig.open(1, 3)
    kept = rig.propose([0, 1], 7)
    # Row 0 reads [26, 37): pages 0 to 5 hold nothing above position 23.
    for index in range(6):
        rig.tables.set(ReqId(0), index, 0)
    assert rig.propose([0, 1], 7, buckets=(4,)) == kept
    assert kept == [rig.expected(0, 7), rig.expected(1, 7)]
