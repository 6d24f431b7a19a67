"""Features into draft KV: the numbers, and that nothing but the named rows changes."""

import pytest
import torch

from memsvc.wire.base import ReqId
from tests.support.draft_rig import PAGE_SIZE, DraftRig
from tests.support.make_drafter import V1, V2

OVERRIDES = [
    (V1, {}),
    (V1, {"attention_bias": True, "attention_value_scale": 0.6}),
    (V2, {"num_key_value_heads": 3, "partial_rotary_factor": 0.5}),
]


@pytest.mark.parametrize(("version", "overrides"), OVERRIDES)
def test_keys_and_values_of_all_layers_are_those_of_the_oracle(version, overrides, tmp_path):
    rig = DraftRig(tmp_path, version, **overrides)
    rig.open(0, 0)
    rig.open(1, 6)
    rig.write({0: (0, 5), 1: (6, 3)})
    for rid, positions in ((0, range(5)), (1, range(9))):
        for position in positions:
            expected = rig.oracle.context_kv(rig.features[rid][position], position)
            page = rig.tables.table[rig.tables.row(ReqId(rid)), position // PAGE_SIZE]
            for layer, (k, v) in enumerate(expected):
                torch.testing.assert_close(rig.pool.k(layer)[page, position % PAGE_SIZE], k, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(rig.pool.v(layer)[page, position % PAGE_SIZE], v, rtol=1e-4, atol=1e-4)


def test_exactly_the_named_rows_change(tmp_path):
    """Compared in bytes over the whole arena: a + 1 rows of each request, in every layer, K and V."""
    rig = DraftRig(tmp_path, V2)
    rig.open(0, 6)
    rig.open(1, 3)
    before = rig.arena.clone()
    rig.write({0: (6, 3), 1: (3, 1)})
    changed = (rig.arena != before).nonzero().flatten()
    kind, shape = rig.pool.kind, rig.shape
    head_bytes = shape.num_kv_heads * shape.head_dim * 4
    allowed = set()
    for rid, position in ((0, 6), (0, 7), (0, 8), (1, 3)):
        page = int(rig.tables.table[rig.tables.row(ReqId(rid)), position // PAGE_SIZE])
        for half in range(2 * shape.num_layers):
            start = page * kind.stride_bytes + (half * PAGE_SIZE + position % PAGE_SIZE) * head_bytes
            allowed.update(range(start, start + head_bytes))
    exchange_start = kind.num_pages * kind.stride_bytes
    in_pool = {int(byte) for byte in changed if byte < exchange_start}
    assert in_pool <= allowed
    # All of them were NaN before, so a row that was not written would show as unchanged everywhere.
    assert len(in_pool) > 0.9 * len(allowed)


def test_no_rows_is_no_change(tmp_path):
    rig = DraftRig(tmp_path, V1)
    rig.open(0, 4)
    before = rig.arena.clone()
    rig.write({0: (4, 0)})
    rig.write({})
    assert torch.equal(rig.arena, before)


def test_bfloat16_features_are_taken_too(tmp_path):
    rig = DraftRig(tmp_path, V1)
    features = torch.randn(2, rig.shape.feature_width)
    positions = torch.tensor([5, 6])
    with torch.inference_mode():
        half = rig.model.context(features.bfloat16(), positions)
        whole = rig.model.context(features.bfloat16().float(), positions)
    assert all(torch.equal(one, other) for one, other in zip(half, whole, strict=True))
