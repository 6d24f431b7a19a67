"""Settings to compare: they are in force while they should be, and what can't be set is said."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from memsvc.device.kernels import block_attention, mlp
from memsvc.device.kernels.attention_tiles import AttentionScratch, Tile
from memsvc.device.kernels.delta_site import DeltaSite, DeltaTile
from tests.bench.variants import KNOBS, Setting, UnknownSettingError, parse_variant

MERGE = "set=memsvc.device.kernels.block_attention._MERGE_PROGRAMS"


def test_constants_are_in_force_and_put_back():
    before = block_attention._MERGE_PROGRAMS, mlp.WARPS
    variant = parse_variant(f"{MERGE}=64+set=memsvc.device.kernels.mlp.WARPS=2")
    assert before == (block_attention._MERGE_PROGRAMS, mlp.WARPS), "not before it is asked for"
    with variant.in_force():
        assert (block_attention._MERGE_PROGRAMS, mlp.WARPS) == (64, 2)
    assert before == (block_attention._MERGE_PROGRAMS, mlp.WARPS) != (64, 2)


def test_constants_are_put_back_after_an_error():
    before = block_attention._MERGE_PROGRAMS
    with pytest.raises(KeyError), parse_variant(f"{MERGE}=64").in_force():
        raise KeyError
    assert before == block_attention._MERGE_PROGRAMS


def test_base_changes_nothing():
    assert parse_variant("base").settings == ()


def a_step() -> Any:
    """As much of a VerifyStep as a tile needs: 9 rows of 4 query heads on 2 key-value heads."""
    return SimpleNamespace(
        _attention=AttentionScratch.for_buckets((4,), 9, (8, 2), 16, "cpu"),
        _config=SimpleNamespace(block_size=9, max_places=4),
        _network=SimpleNamespace(model=SimpleNamespace(shape=SimpleNamespace(num_kv_heads=2, group_size=4))),
    )


def test_a_tile_comes_with_room_for_its_parts():
    step = a_step()
    before = step._attention
    parse_variant("attention-tile=32,4,2,9").change(step)
    found = step._attention
    assert found.tile == Tile(32, 4, 2, 9)
    assert found.splits(4, 2, 1000, found.tile) == 9 * before._num_multiprocessors // 2
    assert found.partial.shape[1:] == before.partial.shape[1:]
    small = a_step()
    parse_variant("attention-tile=32,4,2,1").change(small)
    assert small._attention.num_chunks == before.num_chunks, "never less than there was"


def test_a_tile_of_states_is_every_layers():
    sites = [DeltaSite(memory=None, layer=layer, conv=torch.zeros(4, 8)) for layer in (0, 1)]  # type: ignore[arg-type]
    step: Any = SimpleNamespace(_memory=SimpleNamespace(states=SimpleNamespace(sites=sites)))
    parse_variant("delta-tile=32,4").change(step)
    assert [(site.layer, site.tile) for site in sites] == [(0, DeltaTile(32, 4)), (1, DeltaTile(32, 4))]
    parse_variant("delta-tile=64,8,128").change(step)
    assert sites[1].tile == DeltaTile(64, 8, registers=128)
    dense: Any = SimpleNamespace(_memory=SimpleNamespace(states=None))
    with pytest.raises(UnknownSettingError, match="no states"):
        parse_variant("delta-tile=32,4").change(dense)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("faster", "'faster' is none of attention-tile, delta-tile, set"),
        (f"{MERGE}=much", "ValueError"),
        (f"{MERGE}=0.5", "is of another type"),
        ("set=memsvc.nowhere.NUMBER=3", "ModuleNotFoundError"),
        ("set=memsvc.device.kernels.launch.NOTHING=3", "AttributeError"),
        ("set=NUMBER=3", "ValueError"),
        ("attention-tile=64,4,3", "BLOCK,WARPS,STAGES,PROGRAMS"),
        ("attention-tile=48,4,3,2", "no kernel is cut like this"),
        ("delta-tile=64", "COLUMNS,WARPS"),
        ("delta-tile=64,8,128,1", "COLUMNS,WARPS"),
        ("delta-tile=8,4", "no kernel is cut like this"),
        ("delta-tile=64,8,0", "no kernel is cut like this"),
        ("attention-tile=64,4,3,2,1", "BLOCK,WARPS,STAGES,PROGRAMS"),
    ],
)
def test_what_can_not_be_set_is_said(text: str, why: str):
    with pytest.raises(UnknownSettingError, match=why):
        parse_variant(text)


def test_a_knob_more_is_one_function(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KNOBS, "warps", lambda value: Setting(constants=((mlp, "WARPS", 2 * int(value)),)))
    with parse_variant(f"warps=3+{MERGE}=64").in_force():
        assert (mlp.WARPS, block_attention._MERGE_PROGRAMS) == (6, 64)
