"""Where slots lie, and how the host changes them."""

import itertools
import struct

import pytest
import torch

from memsvc.device.row_sampler import RowSampler
from memsvc.device.slots import SlotState, SlotWriter
from memsvc.slot_layout import (
    DONE_CLOSED,
    FLOATS,
    SCALARS,
    SCALARS_AT,
    SlotLayout,
)
from memsvc.wire.text import Sampling


def made(layout: SlotLayout | None = None) -> tuple[SlotState, SlotWriter]:
    layout = layout or SlotLayout(5, 8, 300)
    slots = SlotState(layout, torch.full((layout.num_bytes,), 0x77, dtype=torch.uint8))
    slots.reset()
    return slots, SlotWriter(slots)


def sampler(prompt: list[int], output: list[int], **params) -> RowSampler:
    return RowSampler(Sampling(**({"seed": 1, "max_tokens": 50} | params)), eos_ids=[2], prompt=prompt, output=output)


@pytest.mark.parametrize(("num_slots", "block_size", "vocab"), [(1, 1, 1), (5, 8, 300), (64, 16, 4099)])
def test_fields_are_aligned_apart_and_inside_the_region(num_slots, block_size, vocab):
    layout = SlotLayout(num_slots, block_size, vocab)
    slots, _ = made(layout)
    first = slots.words.data_ptr()
    parts = [(first, first + SCALARS_AT)]
    fields = [getattr(slots, name) for name in (*SCALARS, "drafts", "emitted", "stop_ids", "prompt_seen", "counts")]
    for field in fields:
        if field.numel():
            # Rows of drafts lie one place apart even if blocks have no drafts.
            span = (field.shape[0] - 1) * field.stride(0) + (field.shape[1] if field.dim() == 2 else 1)
            parts.append((field.data_ptr(), field.data_ptr() + span * field.itemsize))
    parts.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(parts))
    assert all((start - first) % 256 == 0 for start, _ in parts)
    assert parts[-1][1] <= first + layout.num_bytes
    assert layout.count_width >= vocab
    assert slots.prompt_seen.shape[1] * 32 >= vocab
    assert all(field.shape[0] == num_slots + 1 for field in fields)


def test_a_region_of_another_size_is_refused():
    layout = SlotLayout(5, 8, 300)
    with pytest.raises(ValueError, match=f"slots need {layout.num_bytes} bytes, the region has 256"):
        SlotState(layout, torch.zeros(256, dtype=torch.uint8))


def test_both_sides_see_the_same_bytes():
    slots, writer = made()
    other = SlotState(slots.layout, slots.words.view(torch.uint8))
    writer.open(3, sampler([1], []), length=0)
    writer.flush(torch.from_numpy)
    assert other.done.tolist() == [DONE_CLOSED, DONE_CLOSED, DONE_CLOSED, 0, DONE_CLOSED, DONE_CLOSED]


def test_an_opened_slot_holds_the_samplers_facts_and_nothing_of_the_one_before():
    slots, writer = made()
    seed = -(2**40) - 5
    for params in (
        {"repetition_penalty": 1.5, "top_k": 3, "stop_token_ids": [9, 5], "min_tokens": 4, "ignore_eos": True},
        {"seed": seed, "temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.5, "min_tokens": 7},
    ):
        writer.open(3, sampler([1, 31, 32, 299], [7, 7, 8], **params), length=6, anchor=8, valid_from=2)
        writer.flush(torch.from_numpy)
        if "seed" not in params:
            assert slots.stop_ids[3, :3].tolist() == [5, 9, 2]
            assert (slots.num_stop_ids[3], slots.num_withheld_ids[3]) == (2, 3)
            bits = [t for t in range(300) if slots.prompt_seen[3, t // 32] >> t % 32 & 1]
            assert bits == [1, 31, 32, 299]
            slots.counts[3, 100] = 4
    facts = [int(getattr(slots, name)[3]) for name in ("length", "anchor", "valid_from", "n_out", "num_tokens")]
    assert facts == [6, 8, 2, 3, 7]
    assert (slots.top_k[3], slots.min_tokens[3], slots.max_tokens[3]) == (0, 7, 50)
    assert slots.temperature[3] == torch.tensor(0.7)
    assert slots.min_p[3] == torch.tensor(0.1)
    words = [int(getattr(slots, name)[3]) for name in ("top_p_low", "top_p_high", "seed_low", "seed_high")]
    assert struct.unpack("<d", struct.pack("<2i", *words[:2])) == (0.9,)
    assert struct.unpack("<q", struct.pack("<2i", *words[2:])) == (seed,)
    assert (slots.stop_ids[3, 0], slots.num_stop_ids[3], slots.num_withheld_ids[3]) == (2, 1, 1)
    # A presence penalty alone asks for no prompt.
    assert not slots.prompt_seen[3].any()
    assert {t: int(c) for t, c in enumerate(slots.counts[3]) if c} == {7: 2, 8: 1}
    assert not slots.counts[[0, 1, 2, 4, 5]].any()


def test_a_temperature_that_counts_as_zero_is_zero_on_the_device():
    slots, writer = made()
    writer.open(1, sampler([1], [], temperature=0.9e-5), length=0)
    writer.open(2, sampler([1], [], temperature=1e-5), length=0)
    writer.flush(torch.from_numpy)
    assert slots.temperature[1] == 0
    assert slots.temperature[2] > 0


def test_nothing_changes_before_the_flush_and_a_flush_without_changes_stages_nothing():
    slots, writer = made()
    before = slots.words.clone()
    writer.open(2, sampler([1], []), length=0)
    writer.close(2)
    assert torch.equal(slots.words, before)
    staged = []
    writer.flush(lambda values: torch.from_numpy(staged.append(values) or values))
    writer.flush(lambda values: torch.from_numpy(staged.append(values) or values))
    assert len(staged) == 1
    assert slots.done[2] == DONE_CLOSED


def test_the_later_of_two_changes_wins():
    slots, writer = made()
    writer.close(4)
    writer.open(4, sampler([1], [3]), length=1)
    writer.set(4, "feature_row", 11)
    writer.set(4, "feature_row", 12)
    writer.flush(torch.from_numpy)
    assert (slots.done[4], slots.length[4], slots.feature_row[4]) == (0, 1, 12)


@pytest.mark.parametrize("slot", [0, 6, -1])
def test_the_dummy_slot_and_slots_that_do_not_exist_are_refused(slot):
    _, writer = made()
    with pytest.raises(ValueError, match=r"outside \[1, 5\]"):
        writer.close(slot)


def test_more_stop_ids_than_a_slot_holds_are_refused():
    _, writer = made()
    with pytest.raises(ValueError, match="81 stop ids, a slot holds 80"):
        writer.open(1, sampler([1], [], stop_token_ids=list(range(100, 180))), length=0)


def test_every_float_is_a_scalar():
    assert set(SCALARS) >= FLOATS
    assert len(set(SCALARS)) == len(SCALARS)
