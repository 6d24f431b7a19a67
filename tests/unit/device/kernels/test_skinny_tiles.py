"""How products of few rows are cut: every part has one program, and the kernels and the host count alike."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from memsvc.device.kernels.skinny_tiles import MAX_SLABS, Cut, SkinnyPlan, default_plan


@pytest.mark.parametrize(
    "plan", [SkinnyPlan(64, 128, splits=s) for s in (1, 3, 5)] + [SkinnyPlan(64, 64, streams=s) for s in (1, 2, 4)]
)
@pytest.mark.parametrize(
    "sizes", [(1, 4096, 4096), (9, 6144, 5120), (72, 17408, 576), (144, 248320, 5120), (288, 1280, 17408)]
)
def test_every_part_of_every_unit_has_one_program(plan, sizes):
    cut = Cut.of(plan, sizes, 132)
    # Tiled, the last program of a unit may have fewer parts.
    assert (cut.programs - 1) * cut.per < cut.units * cut.parts <= cut.programs * cut.per
    sharers = [((u + 1) * cut.parts - 1) // cut.per - u * cut.parts // cut.per + 1 for u in range(cut.units)]
    assert max(sharers) <= cut.slabs <= max(sharers) + 1
    if not plan.streams:
        assert set(sharers) == {cut.slabs}


def test_more_programs_a_unit_than_can_be_added_up_are_refused():
    with pytest.raises(ValueError, match="33 programs"):
        Cut.of(SkinnyPlan(64, 16, splits=33), (1, 64, 33 * 16), 132)
    with pytest.raises(ValueError, match="programs share"):
        Cut.of(SkinnyPlan(64, 16, streams=2), (1, 128, 16384), 132)


@pytest.mark.parametrize(
    "sizes", [(1, 1280, 5120), (9, 6144, 4096), (72, 4096, 12288), (128, 248320, 5120), (288, 64, 64)]
)
def test_the_plan_by_reasoning_fills_the_device_where_there_is_enough_to_do(sizes):
    cut = Cut.of(default_plan(*sizes), sizes, 132)
    assert cut.slabs <= MAX_SLABS
    assert cut.programs >= 128 or sizes[1] < 4096
